"""Events about edited rows: values before and after, without secrets."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db.models import Model
from django.utils.crypto import salted_hmac

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity
from controlplane.events.services import record

SECRET_FIELDS = frozenset({"password", "sha256"})
MARKED_FIELDS = frozenset({"api_key", "secret", "secrets", "receivers"})
"""Secrets that are used as they are: the mark shows that one was exchanged."""
# Set by the system at every save or use: not part of a change.
IGNORED_FIELDS = frozenset({"changed_at", "created_at", "last_login", "last_used_at", "date_joined", "launched_with"})


def snapshot(row: Model) -> dict[str, Any]:
    """Return the editable state of *row* as JSON values: related rows by name, secrets as marks."""
    values: dict[str, Any] = {}
    for field in row._meta.concrete_fields:
        if field.primary_key or field.name in IGNORED_FIELDS:
            continue
        if field.name in SECRET_FIELDS:
            values[field.name] = "set" if getattr(row, field.name) else "not set"
        elif field.name in MARKED_FIELDS and not field.is_relation:
            values[field.name] = mark(getattr(row, field.name))
        elif field.is_relation:
            related = getattr(row, field.name)
            values[field.name] = str(related) if related is not None else None
        else:
            values[field.name] = _plain(getattr(row, field.attname))
    for field in row._meta.many_to_many:
        values[field.name] = sorted(str(other) for other in getattr(row, field.name).all())
    return values


def record_change(row: Model, before: dict[str, Any], actor: User | str, *, reason: str = "") -> Event | None:
    """Record `<row>.changed` with the fields of *row* that differ from *before*; None if nothing does."""
    after = snapshot(row)
    changed = sorted(name for name in after if before.get(name) != after[name])
    if not changed:
        return None
    return record(
        f"{kind_of(row)}.changed",
        row,
        actor=actor,
        before={name: before.get(name) for name in changed},
        after={name: after[name] for name in changed},
        reason=reason,
    )


def record_creation(row: Model, actor: User | str, *, reason: str = "") -> Event:
    return record(f"{kind_of(row)}.created", row, actor=actor, after=snapshot(row), reason=reason)


def record_deletion(row: Model, actor: User | str, *, reason: str = "") -> Event:
    """Record `<row>.deleted`; call it before *row* is deleted."""
    return record(
        f"{kind_of(row)}.deleted", row, actor=actor, before=snapshot(row), reason=reason, severity=Severity.WARNING
    )


def kind_of(row: Model) -> str:
    """Return the first part of an event's kind: `api_key` for an ApiKey."""
    return str(row._meta.verbose_name).lower().replace(" ", "_").replace("-", "_")


def mark(secret: Any) -> Any:
    """Return a mark in place of a secret: whether it is set, and six digits of a keyed hash. Of a dict, for each value."""
    if isinstance(secret, dict):
        return {name: mark(text) for name, text in sorted(secret.items())}
    return f"set ({salted_hmac('audit', str(secret), algorithm='sha256').hexdigest()[:6]})" if secret else "not set"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value.normalize()) if value else "0"
    return value
