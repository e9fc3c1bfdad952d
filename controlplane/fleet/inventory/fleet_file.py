"""Fleet file: a fleet in one TOML file, compared with and applied to the inventory.

Tables are named as the paths of `/api`, with the same fields (`[[regions]]`, `[[gpu_types]]`, ...). What a table does not
name stays as it is. In `secrets` and `api_key`, `${NAME}` is the value of an environment variable, so that a file can be
kept in a repository.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import transaction
from pydantic import ValidationError as SchemaError

from controlplane.accounts.models import User
from controlplane.events.audit import mark
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import BY_NAME, KINDS, MODEL, Kind
from controlplane.fleet.lifecycle.states import ActionError

NUL = re.compile(r"\\(?:u0000|U00000000)")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class FleetFileError(Exception):
    """Error in the file; the text names file, table and key, and *key* that alone."""

    def __init__(self, where: str, text: str = "", key: str = "") -> None:
        super().__init__(": ".join(filter(None, (where, key, text))))
        self.where, self.text, self.key = where, text, key


@dataclass(frozen=True, slots=True)
class Entry:
    """One table of the file: one row."""

    kind: Kind
    where: str
    key: Mapping[str, Any]
    values: Mapping[str, Any]  # without the key

    def of_new_row(self) -> dict[str, Any]:
        """Return the values of a new row, key included. Raises SchemaError if a required one is missing."""
        return self.kind.create.model_validate({**self.key, **self.values}).model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class Change:
    """Row that is created, changed or deleted; `values` has (before, after) of each field that differs."""

    verb: Literal["create", "change", "delete"]
    kind: Kind
    label: str
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def read(path: Path) -> list[Entry]:
    """Return the entries of the file at *path*, in creation order. Raises FleetFileError."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise FleetFileError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FleetFileError(f"{path}: {error}") from error
    if (nul := NUL.search(text)) is not None:
        line = text.count("\n", 0, nul.start()) + 1
        raise FleetFileError(f"{path}: line {line} holds a NUL character, which no text here may have")
    for name in document.keys() - BY_NAME.keys():
        raise FleetFileError(f"{path}: there is no table {name}; tables are {', '.join(BY_NAME)}")
    entries = [entry for kind in KINDS for entry in _entries(path, kind, document.get(kind.name, []))]
    seen: dict[tuple[str, str], str] = {}
    for entry in entries:
        identity = (entry.kind.name, entry.kind.label(entry.key))
        if identity in seen:
            raise FleetFileError(f"{entry.where}: it is in {seen[identity]} already")
        seen[identity] = entry.where
    return entries


def apply(
    entries: list[Entry],
    actor: User | str,
    reason: str = "",
    *,
    prune: bool = False,
    dry_run: bool = False,
) -> list[Change]:
    """Apply *entries* to the inventory, all or nothing, and return the changes.

    With *prune*, rows that the file does not name are deleted, of the kinds that it has tables of. With *dry_run*
    everything is tried and checked, and then undone. Raises FleetFileError.
    """
    with transaction.atomic():
        changes = [each for entry in entries if (each := _reconcile(entry, actor, reason)) is not None]
        _check_shards(entries)
        if prune:
            changes += _prune(entries, actor)
        if dry_run:
            transaction.set_rollback(True)
    return changes


def _entries(path: Path, kind: Kind, tables: Any) -> Iterator[Entry]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise FleetFileError(f"{path}: {kind.name} is a list of tables: write [[{kind.name}]]")
    for number, table in enumerate(tables, 1):
        named = [str(table[name]) for name in kind.key if name in table]
        where = f"{path}: {kind.name}[{number}]" + (f" ({'/'.join(named)})" if named else "")
        try:
            values = kind.entry.model_validate(table).model_dump(exclude_unset=True)
        except SchemaError as error:
            raise FleetFileError(where, *_of_schema(error)) from error
        if kind is MODEL and (folder := path.parent / (values.get("source") or "-")).is_dir():
            values["source"] = str(folder.resolve())  # servers are started elsewhere
        for name in kind.secret & values.keys():
            values[name] = _filled(values[name], f"{where}: {name}")
        yield Entry(kind, where, {name: values.pop(name) for name in kind.key}, values)


def _filled(value: Any, where: str) -> Any:
    """Replace `${NAME}` in *value* by environment variables."""
    if isinstance(value, dict):
        return {name: _filled(text, f"{where}.{name}") for name, text in value.items()}

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise FleetFileError(f"{where}: the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    return VARIABLE.sub(variable, value) if isinstance(value, str) else value


def _reconcile(entry: Entry, actor: User | str, reason: str) -> Change | None:
    kind, label = entry.kind, entry.kind.label(entry.key)
    row = kind.find(entry.key)
    try:
        if row is None:
            row = services.create(kind, entry.of_new_row(), actor, reason, alone=False)
            held: dict[str, Any] = {}
        else:
            held = kind.values_of(row)
            wanted = {name: value for name, value in entry.values.items() if not _same(held.get(name), value)}
            if not wanted:
                return None
            services.change(kind, row, wanted, actor, reason, alone=False)
    except SchemaError as error:
        raise FleetFileError(entry.where, *_of_schema(error)) from error
    except ValidationError as error:
        raise FleetFileError(entry.where, *_of_row(error)) from error
    except ActionError as error:
        raise FleetFileError(entry.where, str(error)) from error
    now = kind.values_of(kind.model._default_manager.get(pk=row.pk))
    differing = {name: (held.get(name), now[name]) for name in now if not held or not _same(held[name], now[name])}
    if held and not differing:
        return None
    return Change("change" if held else "create", kind, label, _shown(kind, differing))


def _check_shards(entries: list[Entry]) -> None:
    """Check models when all have changed: those that are in one shard change one after the other."""
    for entry in entries:
        if entry.kind is MODEL:
            try:
                services.check_shards(MODEL, entry.values, MODEL.find(entry.key))
            except ValidationError as error:
                raise FleetFileError(entry.where, *_of_row(error)) from error


def _prune(entries: list[Entry], actor: User | str) -> list[Change]:
    changes = []
    for kind in reversed(KINDS):
        named = {kind.label(entry.key) for entry in entries if entry.kind is kind}
        if not named or not kind.deletable:
            continue
        for row in kind.model._default_manager.all():
            label = kind.label(kind.key_of(row))
            if label in named:
                continue
            try:
                services.delete(kind, row, actor, "not in the fleet file")
            except ValidationError as error:
                raise FleetFileError(f"--prune: {kind.title} {label}", *_of_row(error)) from error
            changes.append(Change("delete", kind, label))
    return changes


def _same(held: Any, wanted: Any) -> bool:
    if isinstance(held, Decimal) and wanted is not None:
        return held == Decimal(str(wanted))
    if isinstance(held, list) and isinstance(wanted, list):
        return sorted(held) == sorted(wanted)
    return bool(held == wanted)


def _shown(kind: Kind, values: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return *values* with secrets masked, without fields that are empty before and after."""
    return {
        name: (mark(before), mark(after)) if name in kind.secret else (before, after)
        for name, (before, after) in values.items()
        if before not in (None, "", [], {}) or after not in (None, "", [], {})
    }


def _of_schema(error: SchemaError) -> tuple[str, str]:
    """Return what is wrong, and with which key."""
    first = error.errors()[0]
    text = {"extra_forbidden": "there is no such key", "missing": "this key is missing"}.get(first["type"])
    return text or first["msg"], ".".join(str(part) for part in first["loc"])


def _of_row(error: ValidationError) -> tuple[str, str]:
    messages = error.message_dict if hasattr(error, "error_dict") else {NON_FIELD_ERRORS: error.messages}
    name, (message, *_) = next(iter(messages.items()))
    return message, "" if name == NON_FIELD_ERRORS else name
