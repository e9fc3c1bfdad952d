"""Servers without a parser of tool calls: the emulated one refuses as vLLM does."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.vllm.calls import CHAT, post
from tests.vllm.conftest import Server, VllmFleet, emulated

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module", params=["emulator", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "vllm":
        fleet: VllmFleet = request.getfixturevalue("vllm_fleet")
        url = fleet.start("toolless")
        fleet.wait("toolless", url)
        yield Server("vllm", url, "")
        return
    process, url = emulated()
    with process:
        yield Server("emulator", url, "")
        process.terminate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, '"auto" tool choice requires --enable-auto-tool-choice'),
        ({"tool_choice": "required"}, 'tool_choice="required" requires --tool-call-parser to be set'),
    ],
)
async def test_a_call_is_refused(
    server: Server, http: aiohttp.ClientSession, fields: dict[str, Any], message: str
) -> None:
    status, answer, _ = await post(http, server, "/v1/chat/completions", {**CHAT, "tools": TOOLS, **fields})
    error = answer["error"]
    assert (status, error["type"], error["param"], error["code"]) == (400, "BadRequestError", None, 400)
    assert error["message"].startswith(message)
