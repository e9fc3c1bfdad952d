"""Inputs of calls without output: what is embedded, scored, classified or tokenized, and how much of it there is.

vLLM makes one sequence of each input, and of each pair that a cross-encoder scores; a model that embeds scores by the
embeddings of both sides. Prompt tokens are summed over all of them. Only what cannot be measured is refused here.
"""

from itertools import chain
from typing import Any

from controlplane.gateway.admission.turns import characters, chat_turns, message_turns
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.errors import ApiError, invalid
from scheduling.model_task import Task

SIDES = {
    Kind.RERANK: (("query",), ("documents",)),
    Kind.SCORE: (("queries", "data_1", "text_1"), ("documents", "items", "data_2", "text_2")),
}
"""Names of the two sides that are scored, in vLLM's order."""
PAIRING = frozenset({Task.SCORE, Task.CLASSIFY})
"""Tasks of cross-encoders, which read each pair as one sequence."""


def measure(call: Call, task: Task) -> None:
    """Note on *call* its sequences, and the tokens or characters of its inputs, for a model with *task*.

    Raises ApiError 400 for inputs of no known form.
    """
    match call.kind:
        case Kind.RERANK | Kind.SCORE:
            _scored(call, task)
        case Kind.DETOKENIZE:
            tokens = call.body.get("tokens")
            if not isinstance(tokens, list):
                raise invalid("`tokens` must be a list of token ids.", "tokens", "invalid_type")
        case Kind.TOKENIZE:
            _inputs(call, "prompt")
        case Kind.COUNT_TOKENS:
            call.prompt_characters = characters(message_turns(call.body))
        case Kind.COHERE_EMBED:
            _cohere(call)
        case _ if not call.kind.computes:  # rendering: the instance says what is wrong with it
            return
        case Kind.POOLING if "data" in call.body:  # for a plugin of the server, in a form that only it knows
            call.prompt_characters = _characters(call.body["data"])
        case _:
            _inputs(call, "input")


def _inputs(call: Call, name: str) -> None:
    """Measure text, token ids, a list of either, or conversations in *name* or `messages`."""
    given = call.body.get(name)
    if given is None or _is_conversation(given):
        _conversations(call, name if "messages" not in call.body else "messages")
        return
    if isinstance(given, str):
        call.prompt_characters = len(given)
        return
    if not isinstance(given, list):
        raise _no_input(name)
    kinds = set(map(type, given))
    if kinds == {int}:
        call.prompt_tokens = len(given)
    elif kinds == {str}:
        call.sequences, call.prompt_characters = len(given), sum(map(len, given))
    elif kinds == {list} and set(map(type, chain.from_iterable(given))) <= {int}:
        call.sequences, call.prompt_tokens = len(given), max(1, sum(map(len, given)))
    else:
        raise _no_input(name)


def _cohere(call: Call) -> None:
    """Measure Cohere's texts, images or mixed inputs."""
    names = [name for name in ("texts", "images", "inputs") if call.body.get(name) is not None]
    given = call.body[names[0]] if len(names) == 1 else None
    if not isinstance(given, list) or not given:
        code = "invalid_type" if names else "missing_required_parameter"
        raise invalid("One of `texts`, `images` and `inputs` must be a list.", names[0] if names else "texts", code)
    call.sequences = len(given)
    call.prompt_characters = 0 if names == ["images"] else _characters(given)


def _no_input(name: str) -> ApiError:
    message = f"`{name}` must hold text, token ids (integers from 0), or a list of either."
    return invalid(message, name, "invalid_type")


def _is_conversation(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(_first(given), dict)


def _first(given: list[Any]) -> Any:
    """Return the first message of a conversation, or of a list of them."""
    return given[0][0] if isinstance(given[0], list) and given[0] else given[0]


def _conversations(call: Call, name: str) -> None:
    given = call.body.get(name)
    if not isinstance(given, list) or not given:
        message = (
            f"`{name}` must hold text, token ids, a list of either, or messages."
            if name != "messages"
            else ("`messages` must be a list of at least one message.")
        )
        raise invalid(message, name, "missing_required_parameter" if given in (None, []) else "invalid_type")
    conversations = given if isinstance(given[0], list) else [given]
    turns = [chat_turns({"messages": each}) for each in conversations]
    call.sequences, call.prompt_characters = len(turns), sum(map(characters, turns))


def _scored(call: Call, task: Task) -> None:
    """Measure both sides of what is scored: one text to one or many, or as many to as many."""
    names, others = (_named(call, side) for side in SIDES[call.kind])
    ones, many = (
        call.body[name] if isinstance(call.body[name], list) else [call.body[name]] for name in (names, others)
    )
    if not ones or not many:
        raise invalid(f"`{names if not ones else others}` must not be empty.", names if not ones else others)
    size, other_size = (sum(map(_characters, side)) for side in (ones, many))
    if task in PAIRING:
        call.sequences = len(many)
        call.prompt_characters = size * (len(many) if len(ones) == 1 else 1) + other_size
    else:
        call.sequences, call.prompt_characters = len(ones) + len(many), size + other_size


def _named(call: Call, names: tuple[str, ...]) -> str:
    """Return the first of *names* that the body has. Raises ApiError 400 without any."""
    for name in names:
        if call.body.get(name) is not None:
            return name
    raise invalid(f"`{names[0]}` must hold text or a list of texts.", names[0], "missing_required_parameter")


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in *value*; media count nothing."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(_characters(part) for name, part in value.items() if name in ("text", "content"))
    return 0
