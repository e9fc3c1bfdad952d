"""Answers of an emulated server: where in the prose an answer begins, its length, and what ends it.

An answer that must be JSON, and the arguments of a tool call, fit their schema: types, properties, items, enumerations,
bounds, combinations and references within the schema are kept. What only a solver could keep (`pattern`, `not`,
`multipleOf`) is not.
"""

import uuid
from typing import Any

import orjson

from workers.emulator import requested_length, text
from workers.emulator.answers import RequestAnswer, Sequence
from workers.emulator.generation import Generation, Prompt, Tool
from workers.emulator.spec import InstanceSpec

MOST_DEPTH = 12
OPTIONAL_DEPTH = 3
"""Depth beyond which only required properties are given: a schema may refer to itself."""
FORMATS = {
    "date": "2026-01-15",
    "date-time": "2026-01-15T12:00:00Z",
    "time": "12:00:00Z",
    "email": "officer@example.org",
    "uri": "https://example.org/log",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
MOST_WORDS = 4


def example(schema: Any, number: int) -> Any:
    """Return a value of *schema*, drawn by *number* (64 bits): the same number gives the same value."""
    return _draw(schema, number, schema, 0)


def _draw(schema: Any, number: int, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return _draw(_referred(schema["$ref"], root), number, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][number % len(schema["enum"])]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return _draw(schema[name][number % len(schema[name])], number, root, depth + 1)
    if isinstance(schema.get("allOf"), list):
        return _draw(_merged(schema, root), number, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, number, root, depth)
    if kind == "array":
        least, most = int(schema.get("minItems", 1)), int(schema.get("maxItems", 3))
        count = max(least, min(most, 1 + number % 2))
        return [_draw(schema.get("items", {}), text.mixed(number, place), root, depth + 1) for place in range(count)]
    if kind == "string":
        return _string(schema, number)
    if kind == "integer":
        return int(_between(schema, number, 1))
    if kind == "number":
        return _between(schema, number, 0.5)
    return bool(number % 2) if kind == "boolean" else None


def _object(schema: dict[str, Any], number: int, root: Any, depth: int) -> dict[str, Any]:
    required = schema.get("required") or ()
    return {
        name: _draw(inner, text.mixed(number, *name.encode()), root, depth + 1)
        for name, inner in (schema.get("properties") or {}).items()
        if depth < OPTIONAL_DEPTH or name in required
    }


def _string(schema: dict[str, Any], number: int) -> str:
    if schema.get("format") in FORMATS:
        return FORMATS[schema["format"]]
    said = " ".join(text.words(number % len(text.WORDS), 1 + number % MOST_WORDS))
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    return said.ljust(least, ".")[:most]


def _between(schema: dict[str, Any], number: int, step: float) -> float:
    """Return a multiple of *step* within the bounds of *schema*, at most a hundred steps above the lower one."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    if low is None:
        low = 0 if high is None or high >= 0 else high
    steps = 100 if high is None else max(0, min(100, int((high - low) / step)))
    return float(low + step * (number % (steps + 1)))


def _referred(reference: str, root: Any) -> Any:
    """Return the value at `#/…` in *root*; None if there is none."""
    value = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _merged(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Merge the parts of `allOf` into one schema."""
    whole = {name: value for name, value in schema.items() if name != "allOf"}
    for given in schema["allOf"]:
        refers = isinstance(given, dict) and isinstance(given.get("$ref"), str)
        part = _referred(given["$ref"], root) if refers else given
        for name, value in part.items() if isinstance(part, dict) else ():
            if name == "properties":
                whole[name] = {**whole.get(name, {}), **value}
            elif name == "required":
                whole[name] = [*whole.get(name, []), *value]
            else:
                whole.setdefault(name, value)
    return whole


class Content:
    """The answers of one server. Its series of draws continues after a crash."""

    def __init__(self, name: str, spec: InstanceSpec, seed: int) -> None:
        self._spec = spec
        self._seed = text.mixed(seed if spec.seed is None else spec.seed, *name.encode())
        self._model_seed = text.mixed(0, *spec.model.encode())  # a prompt asks the same of a model on all servers
        self._drawn = 0

    def sequence(
        self, answer: RequestAnswer[Generation], index: int, prompt: Prompt, max_tokens: int, arrival_s: float
    ) -> Sequence:
        """Decide the text and length of sequence *index* of *answer*."""
        generation = answer.generation
        said, following = text.answered_before(prompt.ids) if prompt.ids is not None else (0, 0)
        if said and prompt.ids is not None and said < len(prompt.ids):
            number, wanted = self._draw(generation, Prompt("", prompt.ids[:-said]), index)
            wanted = max(1, wanted - said)
        else:
            said = 0
            number, wanted = self._draw(generation, prompt, index)
        tool = _called(generation, number)
        formed = tool.parameters if tool else generation.schema
        if formed is not None:
            pieces = text.pieces_of(orjson.dumps(example(formed, number)).decode())
            return Sequence(
                engine_id=uuid.uuid4().hex,
                answer=answer,
                index=index,
                prompt=prompt,
                max_tokens=max_tokens,
                output_tokens=min(len(pieces), max_tokens),
                offset=0,
                finish_reason="stop" if len(pieces) <= max_tokens else "length",
                stop_reason=None,
                pieces=pieces,
                arrival_s=arrival_s,
                tool=tool.name if tool else "",
                call_id=f"chatcmpl-tool-{uuid.uuid4().hex[:16]}" if tool else "",
            )
        offset = following if said else number % len(text.WORDS)
        count, finish_reason = max_tokens, "length"
        if not generation.body.ignore_eos and max(wanted, generation.min_tokens) < max_tokens:
            count, finish_reason = max(wanted, generation.min_tokens, 1), "stop"
        stopped = None
        if generation.stop:
            shown = count - (finish_reason == "stop")  # the end-of-sequence token has no text
            include = generation.body.include_stop_str_in_output
            stopped = text.cut_at_stop(offset, shown, tuple(generation.stop), generation.min_tokens, include)
        return Sequence(
            engine_id=uuid.uuid4().hex,
            answer=answer,
            index=index,
            prompt=prompt,
            max_tokens=max_tokens,
            output_tokens=len(stopped[0]) if stopped else count,
            offset=offset,
            finish_reason="stop" if stopped else finish_reason,
            stop_reason=stopped[1] if stopped else None,
            pieces=stopped[0] if stopped else None,
            arrival_s=arrival_s,
            goes_on=said > 0,
        )

    def _draw(self, generation: Generation, prompt: Prompt, index: int) -> tuple[int, int]:
        """Return the number that decides the text, and the answer's length in tokens before any cut.

        With a seed or temperature 0 the same prompt gets the same answer; otherwise the next number of this server's
        series decides, so that a run can be repeated.
        """
        seed = generation.body.seed
        if generation.body.temperature == 0 or seed is not None:
            number = text.mixed(self._seed, prompt.digest, seed or 0, index)
        else:
            self._drawn += 1
            number = text.mixed(self._seed, prompt.digest, self._drawn, index)
        requested = requested_length.read(prompt.text, prompt.tokens) if prompt.ids is None else None
        if requested is not None:
            length = requested_length.draw(requested, text.mixed(self._model_seed, prompt.digest), number)
        else:
            length = text.output_tokens(number, self._spec.output_median_tokens, self._spec.output_sigma)
        return number, length


def _called(generation: Generation, number: int) -> Tool | None:
    """Return the tool that an answer calls; where the choice is free, half of the answers call one."""
    if not generation.tools or (not generation.must_call and number % 2):
        return None
    return generation.tools[(number >> 1) % len(generation.tools)]
