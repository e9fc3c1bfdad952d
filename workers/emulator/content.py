"""Answers of an emulated server: where in the prose an answer begins, its length, and what ends it.

An answer that must be JSON, and the arguments of a tool call, have the types, properties, items and enumerations of their
schema, and references within it; bounds and patterns are not kept.
"""

import uuid
from typing import Any, Final

import orjson

from workers.emulator import requested_length, text
from workers.emulator.answers import Answer, Sequence
from workers.emulator.calls import CheckedCall, Prompt, Tool
from workers.emulator.spec import InstanceSpec

MAX_DEPTH: Final = 12
OPTIONAL_DEPTH: Final = 3
"""Depth beyond which only required properties are given: a schema may refer to itself."""
MAX_WORDS: Final = 4


def example(schema: Any, number: int) -> Any:
    """Return a value of *schema*, drawn by *number* (64 bits): the same number gives the same value."""
    return _draw(schema, number, schema, 0)


def _draw(schema: Any, number: int, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return _draw(_referred(schema["$ref"], root), number, root, depth + 1)
    for name in ("enum", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            chosen = schema[name][number % len(schema[name])]
            return chosen if name == "enum" else _draw(chosen, number, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    match kind:
        case "object":
            properties, required = schema.get("properties") or {}, schema.get("required") or ()
            return {
                name: _draw(inner, text.mixed(number, *name.encode()), root, depth + 1)
                for name, inner in properties.items()
                if depth < OPTIONAL_DEPTH or name in required
            }
        case "array":
            count = max(int(schema.get("minItems", 1)), 1)
            return [
                _draw(schema.get("items", {}), text.mixed(number, place), root, depth + 1) for place in range(count)
            ]
        case "string":
            return " ".join(text.words(number % len(text.WORDS), 1 + number % MAX_WORDS))
        case "integer" | "number":
            return int(schema.get("minimum", 0)) + number % 10
        case "boolean":
            return bool(number % 2)
    return None


def _referred(reference: str, root: Any) -> Any:
    """Return the value at `#/…` in *root*; None if there is none."""
    value = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            value = value.get(part) if isinstance(value, dict) else None
    return value


class Content:
    """The answers of one server. Its series of draws continues after a crash."""

    def __init__(self, name: str, spec: InstanceSpec, seed: int) -> None:
        self._spec = spec
        self._seed = text.mixed(seed if spec.seed is None else spec.seed, *name.encode())
        self._model_seed = text.mixed(0, *spec.model.encode())  # a prompt asks the same of a model on all servers
        self._drawn = 0

    def sequence(self, answer: Answer, index: int, prompt: Prompt, max_tokens: int, arrival_s: float) -> Sequence:
        """Decide the text and length of sequence *index* of *answer*."""
        asked = answer.asked
        before, following = text.answered_before(prompt.ids) if prompt.ids is not None else (0, 0)
        if before and prompt.ids is not None and before < len(prompt.ids):
            number, wanted = self._draw(asked, Prompt("", prompt.ids[:-before]), index)
            wanted = max(1, wanted - before)
        else:
            before = 0
            number, wanted = self._draw(asked, prompt, index)
        sequence = Sequence(uuid.uuid4().hex, answer, index, prompt, max_tokens, arrival_s)
        tool = _called(asked, number)
        formed = tool.parameters if tool else asked.schema
        if formed is not None:
            pieces = text.pieces_of(orjson.dumps(example(formed, number)).decode())
            sequence.pieces, sequence.output_tokens = pieces, min(len(pieces), max_tokens)
            sequence.finish_reason = "stop" if len(pieces) <= max_tokens else "length"
            if tool:
                sequence.tool, sequence.call_id = tool.name, f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
            return sequence
        sequence.offset = following if before else number % len(text.WORDS)
        sequence.continues = before > 0
        if self._spec.offload_blocks:
            whole = Prompt("", prompt.ids[:-before]) if before and prompt.ids is not None else prompt
            sequence.own = whole.digest, (sequence.offset - before) % len(text.WORDS)
        least = asked.get("min_tokens", 0)
        sequence.output_tokens = max_tokens
        if not asked.get("ignore_eos") and max(wanted, least) < max_tokens:
            sequence.output_tokens, sequence.finish_reason = max(wanted, least, 1), "stop"
        if asked.stop:
            shown = sequence.output_tokens - (sequence.finish_reason == "stop")  # the end-of-sequence token has no text
            include = bool(asked.get("include_stop_str_in_output"))
            if stopped := text.cut_at_stop(sequence.offset, shown, tuple(asked.stop), least, include):
                sequence.pieces, sequence.stop_reason = stopped
                sequence.output_tokens, sequence.finish_reason = len(stopped[0]), "stop"
        return sequence

    def _draw(self, asked: CheckedCall, prompt: Prompt, index: int) -> tuple[int, int]:
        """Return the number that decides the text, and the answer's length in tokens before any cut.

        With a seed or temperature 0 the same prompt gets the same answer; otherwise the next number of this server's
        series decides, so that a run can be repeated.
        """
        seed = asked.get("seed")
        if asked.get("temperature") == 0 or seed is not None:
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


def _called(asked: CheckedCall, number: int) -> Tool | None:
    """Return the tool that an answer calls; where the choice is free, half of the answers call one."""
    if not asked.tools or (not asked.must_call and number % 2):
        return None
    return asked.tools[(number >> 1) % len(asked.tools)]
