"""An OpenAPI 3.1 document as a page shows it: operations by tag, fields flat with dotted names, a curl for each."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

METHODS = ("get", "post", "put", "patch", "delete")
MOST_DEPTH = 2
"""Fields of fields are listed so deep; what lies below is named by its type."""
SESSION = '"Cookie: sessionid=$SESSION; csrftoken=$CSRF"'
EXAMPLES = {"string": "…", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
FORMATS = {"date-time": "2026-01-15T12:00:00Z", "date": "2026-01-15"}


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter, or a field of a body; *limits* are what else its schema says."""

    name: str
    kind: str
    required: bool
    description: str
    place: str = ""  # path, query or header
    limits: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    status: str
    description: str
    kind: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    id: str
    method: str
    path: str
    summary: str
    description: str
    who: str
    parameters: tuple[Field, ...]
    body: tuple[Field, ...]
    answers: tuple[Answer, ...]
    curl: str


@dataclass(frozen=True, slots=True)
class Section:
    """The operations of one tag."""

    id: str
    title: str
    operations: tuple[Operation, ...]


class Document:
    """Reads *document*; addresses in its curls begin with *base_url*."""

    def __init__(self, document: dict[str, Any], base_url: str) -> None:
        self._document = document
        self._base_url = base_url

    def sections(self) -> list[Section]:
        """Sections and their operations in the document's order."""
        by_tag: dict[str, list[Operation]] = {}
        for path, item in self._document["paths"].items():
            for method in METHODS:
                if method in item:
                    tag = (item[method].get("tags") or ["Other"])[0]
                    by_tag.setdefault(tag, []).append(self._operation(method, path, item[method]))
        return [Section(f"tag-{_slug(tag)}", tag, tuple(operations)) for tag, operations in by_tag.items()]

    def _operation(self, method: str, path: str, item: dict[str, Any]) -> Operation:
        by_key = any("KeyCaller" in scheme for scheme in item.get("security", ()))
        by_session = any("SessionCaller" in scheme for scheme in item.get("security", ()))
        body = _schema_of(item.get("requestBody"))
        return Operation(
            id=item["operationId"],
            method=method.upper(),
            path=path,
            summary=item["summary"],
            description=item.get("description", ""),
            who=" or ".join(word for word, may in (("API key", by_key), ("session", by_session)) if may) or "anybody",
            parameters=tuple(self._parameter(parameter) for parameter in item.get("parameters", ())),
            body=tuple(self._fields(body)) if body else (),
            answers=tuple(
                Answer(status, answer.get("description", ""), self._kind(schema), tuple(self._fields(schema)))
                for status, answer in item["responses"].items()
                if (schema := _schema_of(answer)) is not None or status != "default"
            ),
            curl=self._curl(method, path, item, body, by_key=by_key),
        )

    def _parameter(self, parameter: dict[str, Any]) -> Field:
        schema = parameter.get("schema", {})
        return Field(
            name=parameter["name"],
            kind=self._kind(schema),
            required=bool(parameter.get("required")),
            description=parameter.get("description", ""),
            place=parameter["in"],
            limits=_limits(schema),
        )

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            node: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                node = node[part]
            schema = node
        return schema

    def _fields(self, schema: dict[str, Any] | None, prefix: str = "", depth: int = 0) -> Iterator[Field]:
        """Fields of an object, or of the objects in a list, with those within them."""
        inner, prefix = self._unlisted(schema or {}, prefix)
        required = inner.get("required", ())
        for name, given in inner.get("properties", {}).items():
            whole = self._resolved(given)
            about = given.get("description") or whole.get("description", "") if "enum" not in whole else ""
            yield Field(f"{prefix}{name}", self._kind(given), name in required, about, limits=_limits(given))
            if depth < MOST_DEPTH:
                yield from self._fields(given, f"{prefix}{name}.", depth + 1)

    def _unlisted(self, schema: dict[str, Any], prefix: str) -> tuple[dict[str, Any], str]:
        """The schema of an object within null or a list, and the prefix of its fields' names."""
        inner = self._resolved(schema)
        if "anyOf" in inner:
            some = [each for each in inner["anyOf"] if each.get("type") != "null"]
            inner = self._resolved(some[0]) if len(some) == 1 else {}
        if inner.get("type") == "array":
            return self._unlisted(inner.get("items", {}), f"{prefix.removesuffix('.')}[].")
        return inner, prefix

    def _kind(self, schema: dict[str, Any] | None) -> str:
        if not schema:
            return "anything"
        if "anyOf" in schema:
            return " or ".join(dict.fromkeys(map(self._kind, schema["anyOf"])))
        inner = self._resolved(schema)
        if "enum" in inner or "const" in inner:
            return " | ".join(json.dumps(value) for value in inner.get("enum", [inner.get("const")]))
        kind = inner.get("type")
        if kind == "array":
            return f"list of {self._kind(inner.get('items'))}"
        if kind == "object" and "$ref" in schema:
            return str(schema["$ref"].rpartition("/")[2].strip("_"))
        return str(inner.get("format") or kind or "anything")

    def _curl(self, method: str, path: str, item: dict[str, Any], body: dict[str, Any] | None, *, by_key: bool) -> str:
        """A call with what is required; headers as a key or a session needs them."""
        address = self._base_url + re.sub(r"\{(\w+)\}", lambda part: part[1].upper(), path)
        query = [each["name"] for each in item.get("parameters", ()) if each["in"] == "query" and each.get("required")]
        if query:
            address += "?" + "&".join(f"{name}={name.upper()}" for name in query)
        begin = "curl" if method == "get" else f"curl -X {method.upper()}"
        lines = [f'{begin} "{address}"']
        if by_key:
            lines.append('-H "Authorization: Bearer $KEY"')
        elif item.get("security"):
            lines.append(f"-H {SESSION}")
            if method != "get":
                lines.append('-H "X-CSRFToken: $CSRF"')
        if body:
            example = item["requestBody"]["content"]["application/json"].get("example") or self._example(body)
            lines.append('-H "Content-Type: application/json"')
            lines.append(f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}")
        return " \\\n  ".join(lines)

    def _example(self, schema: dict[str, Any]) -> Any:
        """A value with the fields that *schema* requires, or its first field where it requires none."""
        if "anyOf" in schema:
            return self._example(schema["anyOf"][0])
        inner = self._resolved(schema)
        if "enum" in inner:
            return inner["enum"][0]
        if "properties" in inner:
            names = inner.get("required") or list(inner["properties"])[:1]
            return {name: self._example(inner["properties"][name]) for name in names}
        if inner.get("format") in FORMATS:
            return FORMATS[inner["format"]]
        return inner.get("default", EXAMPLES.get(inner.get("type", "")))


def _schema_of(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema of a body or an answer in JSON."""
    schema: dict[str, Any] | None = ((content or {}).get("content") or {}).get("application/json", {}).get("schema")
    return schema


def _limits(schema: dict[str, Any]) -> str:
    """Default and bounds, as words."""
    words = []
    if schema.get("default") not in (None, ""):
        words.append(f"default {json.dumps(schema['default'])}")
    for part in (schema, *schema.get("anyOf", ())):
        for name, word in (("minimum", "at least"), ("maximum", "at most"), ("maxLength", "characters at most")):
            if name in part:
                words.append(f"{part[name]} {word}" if name == "maxLength" else f"{word} {part[name]}")
    return ", ".join(dict.fromkeys(words))


def _slug(tag: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", tag.lower()).strip("-")
