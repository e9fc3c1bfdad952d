"""What is kept of an instance's error, and who may read it."""

import pytest


@pytest.mark.parametrize("stream", [True, False])
async def test_which_instance_failed_is_in_the_trace_and_not_in_the_answer(served, stream):
    """The caller learns that it failed; the instance is only for operators."""
    served.backends[0].script.status = 500
    answer = await served.chat(stream=stream)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (502, "upstream_failed")
    (row,) = await served.rows()
    assert row.error_message == error["message"]
    assert "m-0" not in error["message"]
    assert {step["lost"] for step in row.trace} == {"m-0: answered 500"}


async def test_an_answer_that_breaks_off_says_why(served):
    served.backends[0].script.die = "midway"
    answer = await served.chat(stream=True)
    assert b"upstream_interrupted" in await answer.read()
    (row,) = await served.rows()
    assert row.error_message == "The instance that served this request failed before the answer was complete."
    assert row.trace[-1]["lost"].startswith("m-0: ")
