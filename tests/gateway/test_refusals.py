"""What is kept of an instance's error and who may read it: its message, without the request's content."""

import orjson
import pytest

from controlplane.gateway.upstream.answers import LEFT_OUT, LONGEST, message_of, without_quotations

CONTEXT = "This model's maximum context length is 8192 tokens. However, your request has 9000 input tokens."


def openai(message: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})


def chat(text: str) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def test_words_of_the_instance_are_kept():
    assert message_of(openai(CONTEXT), chat("hello")) == CONTEXT
    assert message_of(b"Internal Server Error", chat("hello")) == "Internal Server Error"
    assert message_of(b'{"error": "worker died"}', chat("hello")) == "worker died"
    assert message_of(b"", chat("hello")) == ""
    assert message_of(b"[1, 2]", chat("hello")) == "[1, 2]"
    assert len(message_of(openai("word and " * 4000), chat("hello"))) <= LONGEST


@pytest.mark.parametrize(
    "message",
    [
        # vLLM 0.32, `handlers/validation.py`: the offending value is under `input`
        "[{'type': 'literal_error', 'loc': ('body', 'messages', 0), 'msg': 'bad', 'input': {'content': 'SECRET'}}]",
        "1 validation error for Request messages.0 [type=missing, input_value={'content': 'SECRET'}, input_type=dict]",
        "Invalid template: unexpected SECRET at position 3",
        "Cannot parse `SECRET` as JSON: expecting value",
    ],
)
@pytest.mark.parametrize(
    "secret",
    ["hunter2", "my password is hunter2, and my mother's name is Ada\nLovelace, of London", "geheim 'q' \\ x" * 9],
)
def test_the_request_is_not_quoted(message, secret):
    kept = message_of(openai(message.replace("SECRET", secret)), chat(secret))
    for word in ("hunter2", "password", "mother", "Lovelace", "geheim"):
        assert word not in kept
    assert kept.split(LEFT_OUT)[0].strip()  # its subject is still there


def test_escaped_and_cut_quotations_are_found_too():
    text = "line one\nline two, with more words than one would like to see again in any log\tat all"
    assert "would like" not in without_quotations(f"bad token near {text!r}", chat(text))
    assert "would like" not in without_quotations(f"bad token near {text[20:70]}...", chat(text))


def test_texts_are_found_wherever_they_stand():
    parts = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "swordfish"}]}],
        "tools": [{"x": "swordfish"}],
    }
    assert "swordfish" not in without_quotations("no such tool: swordfish", parts)
    assert without_quotations("The model `m-large` does not exist", {"model": "m-large"}).count("m-large") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_what_instances_said_is_in_the_trace_and_not_in_the_answer(served, stream):
    """The caller learns that it failed; the instance and its message are only for operators."""
    served.backends[0].script.status = 500
    answer = await served.chat(stream=stream)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (502, "upstream_failed")
    (row,) = await served.rows()
    assert row.error_message == error["message"]
    assert "m-0" not in error["message"]
    assert {step["lost"] for step in row.trace} == {"m-0: answered 500: scripted"}


async def test_an_answer_that_breaks_off_says_why(served):
    served.backends[0].script.die = "midway"
    answer = await served.chat(stream=True)
    assert b"upstream_interrupted" in await answer.read()
    (row,) = await served.rows()
    assert row.error_message == "The instance that served this request failed before the answer was complete."
    assert row.trace[-1]["lost"].startswith("m-0: ")
