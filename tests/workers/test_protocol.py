"""Requests of the emulated server: what is refused, and what is read of the rest."""

import json
from typing import Any

import pytest

from tests.workers.conftest import spec
from workers.emulator.calls import ApiError, CheckedCall, Surface, decoded, read

SPEC = spec(max_model_len=1024)
CALLING = spec(max_model_len=1024, enable_auto_tool_choice=True)
MESSAGES = [{"role": "user", "content": "Hello engine"}]
F = {"type": "function", "function": {"name": "f"}}
BASE: dict[Surface, dict[str, Any]] = {
    "completion": {"prompt": "Hello engine"},
    "chat": {"messages": MESSAGES},
    "response": {"input": "Hello engine"},
    "message": {"messages": MESSAGES, "max_tokens": 9},
}


def ask(surface: Surface, server: Any = SPEC, **fields: object) -> CheckedCall:
    given = {**BASE[surface], **fields}
    return read(surface, {name: value for name, value in given.items() if value is not ...}, server)


def refused(surface: Surface, server: Any = SPEC, **fields: object) -> int:
    with pytest.raises(ApiError) as caught:
        ask(surface, server, **fields)
    error = json.loads(caught.value.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return caught.value.status


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": -1}, {"temperature": "hot"}, {"top_k": -2}, {"min_p": 2}, {"presence_penalty": 3}, {"stop": ""},
        {"stream": "perhaps"},
        {"repetition_penalty": 0}, {"stop": ["a"] * 5}, {"max_tokens": 3.5}, {"max_tokens": True}, {"priority": 2**63},
    ],
)  # fmt: skip
@pytest.mark.parametrize("surface", ["completion", "chat"])
def test_bad_values(surface: Surface, fields: dict[str, Any]) -> None:
    assert refused(surface, **fields) == 400


@pytest.mark.parametrize("prompt", [..., ["a", ""], [5] * 1024, [2**40], 5, [-1], {"a": 1}, [None]])
def test_bad_prompts(prompt: object) -> None:
    assert refused("completion", prompt=prompt) == 400


@pytest.mark.parametrize("messages", ["hi", ["hi"], [{"content": "a"}], [{"role": "user", "content": 5}]])
def test_bad_messages(messages: object) -> None:
    assert refused("chat", messages=messages) == 400


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"use_beam_search": True}, {"suffix": "x"}])
def test_fields_that_need_a_model_are_refused(fields: dict[str, Any]) -> None:
    assert refused("completion", **fields) == 501


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"{" * 100_000, b'{"prompt":' + b"9" * 5000 + b"}", b"NaN"])
def test_bodies_that_cannot_be_read(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read("completion", decoded(raw), SPEC)
    assert caught.value.status == 400
    assert len(caught.value.body()) < 10_000


@pytest.mark.parametrize(
    ("surface", "server", "fields", "called"),
    [
        ("chat", CALLING, {"tools": [F]}, (["f"], False, False)),
        ("chat", CALLING, {"tools": [F], "tool_choice": "none"}, ([], False, False)),
        ("chat", CALLING, {"tools": [F], "tool_choice": "required"}, (["f"], True, False)),
        ("chat", CALLING, {"tools": [F], "tool_choice": F}, (["f"], True, True)),
        ("message", CALLING, {"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}, (["f"], True, False)),
        ("message", CALLING, {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f"}}, (["f"], True, True)),
        ("response", CALLING, {"tools": [{"type": "function", "name": "f"}]}, (["f"], False, False)),
        ("response", SPEC, {"tools": [{"type": "function", "name": "f"}]}, ([], False, False)),
        ("chat", CALLING, {"tools": [F], "messages": [*MESSAGES, {"role": "tool", "content": "9"}]}, ([], False, False)),
    ],
)  # fmt: skip
def test_tools_that_may_or_have_to_be_called(surface: Surface, server: Any, fields: Any, called: Any) -> None:
    asked = ask(surface, server, **fields)
    assert ([tool.name for tool in asked.tools], asked.must_call, asked.named) == called


@pytest.mark.parametrize(
    ("server", "fields"),
    [
        (SPEC, {"tools": [F]}),
        (CALLING, {"tool_choice": "required"}),
        (CALLING, {"tools": []}),
        (CALLING, {"tools": [F], "tool_choice": "anything"}),
        (CALLING, {"tools": [F], "tool_choice": {"function": {"name": "g"}}}),
    ],
)
def test_wrong_choices_of_tools(server: Any, fields: dict[str, Any]) -> None:
    assert refused("chat", server, **fields) == 400


def test_lengths_are_cut_to_the_context() -> None:
    assert ask("completion", prompt=[5] * 1022, max_tokens=5).max_tokens == (2,)
    assert ask("completion", prompt=[[5] * 1022, [5] * 10], max_tokens=5).max_tokens == (2, 5)
    assert ask("completion", max_tokens=None).max_tokens == (16,)
    chat = ask("chat")
    assert chat.max_tokens == (1024 - chat.prompts[0].tokens,)
    assert ask("chat", max_tokens=7, max_completion_tokens=5).max_tokens == (5,)


def test_prompt_tokens() -> None:
    assert [p.tokens for p in ask("completion", prompt=[[1, 2], [3, 4, 5]]).prompts] == [2, 3]
    assert [p.tokens for p in ask("completion", prompt=["abcd", "abcde"]).prompts] == [1, 2]
    short = ask("chat").prompts[0].tokens
    assert (
        ask("chat", messages=[{"role": "user", "content": "Hello engine" + "x" * 400}]).prompts[0].tokens == short + 100
    )
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "engine"}]
    assert ask("chat", messages=[{"role": "user", "content": parts}]).prompts[0].tokens == short


def test_the_id_of_a_tool_call_is_no_part_of_the_prompt() -> None:
    """Ids are random: a conversation would be answered otherwise each time, with a call or without one."""

    def prompt(name: str) -> object:
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": name, "content": "9"}
        return ask("chat", messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result]).prompts[0]

    assert prompt("chatcmpl-tool-1") == prompt("chatcmpl-tool-2")


def test_prefix_hashes_agree_as_far_as_the_content_does() -> None:
    one = ask("completion", prompt=[1, 2, 3, 4, 5, 6, 7, 8, 9]).prompts[0].blocks(2)
    two = ask("completion", prompt=[1, 2, 3, 4, 0, 6, 7, 8]).prompts[0].blocks(2)
    assert len(one) == len(two) == 4
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]
    text = ask("completion", prompt="a" * 80 + "b" * 80).prompts[0]
    assert len(text.blocks(16)) == text.tokens // 16
