"""Bad requests and vLLM's answers to them. Statuses, kinds and texts were taken from vLLM 0.32 on CPU."""

import json
from typing import Any

import pytest

from tests.workers.conftest import spec
from workers.emulator.bodies import ApiError, BodyKind, read_body
from workers.emulator.generation import Generation, resolve

SPEC = spec(max_model_len=1024)
MESSAGES = [{"role": "user", "content": "Hello engine"}]
F = {"type": "function", "function": {"name": "f"}}


def ask(kind: BodyKind, **fields: object) -> Generation:
    given = {"prompt": "Hello engine", **fields} if kind == "completion" else {"messages": MESSAGES, **fields}
    given = {name: value for name, value in given.items() if value is not ...}
    return resolve(read_body(kind, "application/json", json.dumps(given).encode()), SPEC)


def refused(kind: BodyKind, **fields: object) -> tuple[int, str, str, str | None]:
    with pytest.raises(ApiError) as caught:
        ask(kind, **fields)
    error = json.loads(caught.value.body())["error"]
    assert error["code"] == caught.value.status
    return error["code"], error["type"], error["message"], error["param"]


def entry(**fields: object) -> str:
    return f"1 validation error:\n  {fields}"


BAD_VALUES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1.", None),
    (
        {"temperature": -1},
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        "temperature",
    ),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2.", None),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2.0.", None),
    ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0.", None),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0.", None),
    ({"stop": ""}, "stop cannot contain an empty string.", None),
]


@pytest.mark.parametrize(("fields", "message", "param"), BAD_VALUES)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_bad_values(kind: BodyKind, fields: dict[str, Any], message: str, param: str | None) -> None:
    assert refused(kind, **fields) == (400, "BadRequestError", message, param)


BAD_TYPES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"max_tokens": 3.5},
        entry(
            type="int_from_float",
            loc="body.max_tokens",
            msg="Input should be a valid integer, got a number with a fractional part",
            input="3.5",
        ),
        "body.max_tokens",
    ),
    (
        {"stop": 5},
        "2 validation errors:\n"
        "  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string', 'input': '5'}\n"
        "  {'type': 'list_type', 'loc': 'body.stop', 'msg': 'Input should be a valid list', 'input': '5'}",
        "body.stop",
    ),
    (
        {"stop": ["a"] * 5},
        "2 validation errors:\n"
        "  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string', "
        "'input': '<list of 5 items>'}\n"
        "  {'type': 'too_long', 'loc': 'body.stop', 'msg': 'List should have at most 4 items after validation, not 5', "
        "'input': '<list of 5 items>', 'ctx': {'field_type': 'List', 'max_length': 4, 'actual_length': 5}}",
        "body.stop",
    ),
]


@pytest.mark.parametrize(("fields", "message", "param"), BAD_TYPES)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_bad_types(kind: BodyKind, fields: dict[str, Any], message: str, param: str) -> None:
    assert refused(kind, **fields) == (400, "Bad Request", message, param)


def test_numbers_in_strings_and_booleans_are_taken_as_vllm_takes_them() -> None:
    assert ask("completion", max_tokens="3").max_tokens == (3,)
    assert ask("completion", max_tokens=3.0).max_tokens == (3,)
    assert ask("completion", max_tokens=True).max_tokens == (1,)


@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        (..., "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"),
        (["a", ""], "The decoder prompt cannot be empty", None),
        ([5] * 1024, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
        ([2**40], f"Token id {2**40} is out of vocabulary", None),
    ],
)
def test_prompts(prompt: object, message: str, param: str | None) -> None:
    assert refused("completion", prompt=prompt) == (400, "BadRequestError", message, param)


@pytest.mark.parametrize("prompt", [5, [-1], {"a": 1}, [None]])
def test_prompts_of_a_wrong_type(prompt: object) -> None:
    code, kind, message, param = refused("completion", prompt=prompt)
    assert (code, kind) == (400, "Bad Request")
    assert "validation errors" in message
    assert param is not None
    assert param.startswith("body.prompt")


@pytest.mark.parametrize("messages", [..., "hi", ["hi"], [{"content": "a"}], [{"role": "user", "content": 5}]])
def test_messages_of_a_wrong_form(messages: object) -> None:
    code, kind, _, param = refused("chat", messages=messages)
    assert (code, kind) == (400, "Bad Request")
    assert param is not None
    assert param.startswith("body.messages")


def test_tools_without_a_parser() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    assert refused("chat", tools=tools) == (400, "BadRequestError", message, None)
    assert ask("chat", tools=tools, tool_choice="none").tools == ()
    for choice, named in (
        ("required", '"required"'),
        ({"type": "function", "function": {"name": "f"}}, 'function "f"'),
    ):
        message = f"tool_choice={named} requires --tool-call-parser to be set"
        assert refused("chat", tools=tools, tool_choice=choice) == (400, "BadRequestError", message, None)


def test_a_tool_that_has_to_be_called() -> None:
    tools = [F]
    body = json.dumps({"messages": MESSAGES, "tools": tools, "tool_choice": "required"}).encode()
    server = spec(max_model_len=1024, enable_auto_tool_choice=True)
    asked = resolve(read_body("chat", "application/json", body), server)
    assert ([tool.name for tool in asked.tools], asked.must_call, asked.named) == (["f"], True, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set."),
        ({"tools": [], "tool_choice": "auto"}, "`tools` must not be an empty array."),
        ({"tools": [F], "tool_choice": "any"}, "Invalid value for `tool_choice`: any!"),
        ({"tools": [F], "tool_choice": {"function": "f"}}, "Invalid value for `function`: `f` in `tool_choice`!"),
        ({"tools": [F], "tool_choice": {"function": {}}}, "Expected field `name` in `function` in `tool_choice`!"),
        (
            {"tools": [F], "tool_choice": {"function": {"name": "g"}}},
            "The tool specified in `tool_choice` does not match",
        ),
    ],
)
def test_wrong_choices_of_tools(fields: dict[str, Any], message: str) -> None:
    code, kind, said, _ = refused("chat", **fields)
    assert (code, kind) == (400, "BadRequestError")
    assert said.startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"use_beam_search": True},
        {"response_format": {"type": "structural_tag"}},
        {"structured_outputs": {"regex": "a"}},
        {"suffix": "x"},
    ],
)
def test_what_cannot_be_emulated_is_said(fields: dict[str, Any]) -> None:
    code, kind, message, param = refused("completion", **fields)
    assert (code, kind) == (501, "NotImplementedError")
    assert param == next(iter(fields))
    assert "not supported by the emulated server" in message


@pytest.mark.parametrize(
    ("content_type", "raw", "message", "param"),
    [
        (
            "text/plain",
            b"{}",
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            None,
        ),
        (
            "application/json",
            b"{not json",
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting property name enclosed in double quotes'}}",
            "body.1",
        ),
        (
            "application/json",
            b"",
            entry(type="missing", loc="body", msg="Field required", input="None"),
            "body",
        ),
        (
            "application/json",
            b"[1, 2]",
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid "
            "dictionary or object to extract fields from', 'input': '<list of 2 items>'}",
            "body",
        ),
    ],
)
def test_bodies_that_cannot_be_read(content_type: str, raw: bytes, message: str, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_body("completion", content_type, raw)
    error = json.loads(caught.value.body())["error"]
    assert error == {"message": message, "type": "Bad Request", "param": param, "code": 400}


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", b"{" * 100_000, b"[" * 100_000, b'{"prompt":' + b"9" * 5000 + b"}", b"NaN"]
)
def test_hostile_bodies_get_an_answer(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        resolve(read_body("completion", "application/json", raw), SPEC)
    assert caught.value.status == 400
    assert len(caught.value.body()) < 10_000


def test_many_errors_are_cut() -> None:
    _, _, message, _ = refused("chat", messages=["hi"] * 50)
    assert message.startswith("50 validation errors:")
    assert message.endswith("...and 40 more errors")
    long_value = refused("completion", max_tokens="x" * 5000)[2]
    assert len(long_value) < 500


def test_lengths_are_cut_to_the_context() -> None:
    assert ask("completion", prompt=[5] * 1022, max_tokens=5).max_tokens == (2,)
    assert ask("completion", prompt=[[5] * 1022, [5] * 10], max_tokens=5).max_tokens == (2, 5)
    assert ask("completion").max_tokens == (16,)
    assert ask("completion", max_tokens=None).max_tokens == (16,)
    chat = ask("chat")
    assert chat.max_tokens == (1024 - chat.prompts[0].tokens,)
    assert ask("chat", max_tokens=7, max_completion_tokens=5).max_tokens == (5,)


def test_prompt_tokens() -> None:
    assert [p.tokens for p in ask("completion", prompt=[[1, 2], [3, 4, 5]]).prompts] == [2, 3]
    assert [p.tokens for p in ask("completion", prompt=["abcd", "abcde"]).prompts] == [1, 2]
    short = ask("chat").prompts[0].tokens
    longer = ask("chat", messages=[{"role": "user", "content": "Hello engine" + "x" * 400}]).prompts[0].tokens
    assert longer - short == 100
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "engine"}]
    assert ask("chat", messages=[{"role": "user", "content": parts}]).prompts[0].tokens == short
    assert ask("chat", messages=[{"role": "user"}]).prompts[0].tokens < short


def test_the_id_of_a_tool_call_is_no_part_of_the_prompt() -> None:
    """Ids are random: a conversation would be answered otherwise each time, with a call or without one."""

    def prompt(name: str) -> object:
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "9"},
        ]
        (prompt,) = ask("chat", messages=said).prompts
        return prompt

    assert prompt("chatcmpl-tool-1") == prompt("chatcmpl-tool-2")


def test_prefix_hashes_agree_as_far_as_the_content_does() -> None:
    one = ask("completion", prompt=[1, 2, 3, 4, 5, 6, 7, 8, 9]).prompts[0].blocks(2)
    two = ask("completion", prompt=[1, 2, 3, 4, 0, 6, 7, 8]).prompts[0].blocks(2)
    assert len(one) == len(two) == 4
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]
    text = ask("completion", prompt="a" * 80 + "b" * 80).prompts[0]
    assert len(text.blocks(16)) == text.tokens // 16
