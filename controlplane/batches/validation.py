"""Check the lines of an input file one by one, as OpenAI does before a batch runs."""

import codecs
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, NamedTuple

import msgspec
from django.conf import settings
from django.core.files import File

from controlplane.gateway.admission.validation import read_body
from controlplane.gateway.errors import ApiError, invalid, quoted
from scheduling.model_task import Task
from workers.vllm.tasks import EMBEDDINGS, GENERATION, PATHS, SCORING

MAX_LINES = 50_000
MAX_LINE_BYTES = 4 * 1024 * 1024
ENDPOINTS = (*GENERATION, EMBEDDINGS, *(f"/v1{path}" for path in SCORING))
"""Paths that a batch may call: OpenAI's, and those that vLLM's own batch runner takes too."""


class Served(NamedTuple):
    """A model or an adapter that lines may ask for."""

    task: Task
    base: str
    """The model that serves it: itself, or the one that it adapts."""


class Line(msgspec.Struct, frozen=True):
    """A valid line: where it lies in the file and which model serves it."""

    number: int
    custom_id: str
    model: str
    offset: int
    size_bytes: int


class Problem(msgspec.Struct, frozen=True):
    """A fault of a line, in the shape of `errors.data` of OpenAI's batch object; *line* None concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def lines_of(file: IO[bytes] | File[bytes]) -> Iterator[bytes]:
    """Yield the lines of *file*; of one that is too large, only as much as shows that."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line


def first_url(file: IO[bytes] | File[bytes]) -> str:
    """Return the url of the first request of *file*, which the others have to have too. Raises ApiError 400 without one."""
    file.seek(0)
    raw = next((line for line in lines_of(file) if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    file.seek(0)
    try:
        url = read_body(raw.removeprefix(codecs.BOM_UTF8), settings.MAX_JSON_DEPTH)[0].get("url")
    except ApiError as error:
        raise invalid(error.message.replace("The request body", "The first line", 1), "file") from None
    if url not in ENDPOINTS:
        raise invalid(f"The url of the first line must be one of {', '.join(ENDPOINTS)}, not {quoted(url)}.", "file")
    return str(url)


def check_lines(lines: Iterable[bytes], endpoint: str, models: Mapping[str, Served]) -> Iterator[Line | Problem]:
    """Check *lines* one by one, in their order. Blank lines are skipped, and a byte order mark before the first.

    *models* are the models and adapters that may be asked for. A line of an adapter waits as its model does. After
    `MAX_LINES` lines, faulty ones included, one last problem ends it.
    """
    seen: dict[str, int] = {}
    offset = requests = 0
    for number, line in enumerate(lines, 1):
        raw = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        offset += len(line)
        start = offset - len(raw)
        if not raw.strip():
            continue
        if requests >= MAX_LINES:
            yield Problem("too_many_requests", f"A batch has at most {MAX_LINES:,} requests.", number)
            return
        requests += 1
        checked = _check(raw, number, start, endpoint, models)
        if isinstance(checked, Line) and (first := seen.setdefault(checked.custom_id, number)) != number:
            message = (
                f"The custom_id {quoted(checked.custom_id)} was used on line {first} already; each must be unique."
            )
            yield Problem("duplicate_custom_id", message, number, "custom_id")
            continue
        yield checked
    if not requests:
        yield Problem("empty_file", "The file has no requests.")


def _check(raw: bytes, number: int, offset: int, endpoint: str, models: Mapping[str, Served]) -> Line | Problem:
    if len(raw) > MAX_LINE_BYTES:
        return Problem("line_too_large", f"This line is larger than {MAX_LINE_BYTES:,} bytes.", number)
    try:
        value, _ = read_body(raw, settings.MAX_JSON_DEPTH)
    except ApiError as error:
        message = error.message.replace("The request body", "This line", 1)
        return Problem("invalid_json_line", message, number)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512 or "\0" in custom_id:
        message = "custom_id must be a text of 1 to 512 characters, none of them NUL."
        return Problem("missing_required_parameter", message, number, "custom_id")
    if value.get("method", "POST") != "POST":
        return Problem("invalid_method", f"The method must be POST, not {quoted(value['method'])}.", number, "method")
    if value.get("url") != endpoint:
        message = f"The url {quoted(value.get('url'))} does not match the batch's endpoint, {endpoint}."
        return Problem("invalid_url", message, number, "url")
    body = value.get("body")
    if not isinstance(body, dict):
        return Problem("missing_required_parameter", "body must be an object.", number, "body")
    model = body.get("model")
    if not isinstance(model, str) or model not in models:
        return Problem("model_not_found", f"The model {quoted(model)} does not exist here.", number, "body.model")
    if endpoint not in (served := PATHS[models[model].task]) and endpoint.removeprefix("/v1") not in served:
        message = f"The model {model!r} does not serve {endpoint}. It serves {', '.join(served)}."
        return Problem("unsupported_endpoint", message, number, "body.model")
    if body.get("stream"):
        return Problem(
            "invalid_value", "Requests of a batch are not streamed: leave out stream.", number, "body.stream"
        )
    return Line(number, custom_id, models[model].base, offset, len(raw))
