"""Prompts are tokenized for the exact prefix index only while that takes less time than it can save, and within bounds."""

from types import SimpleNamespace

import msgspec
import pytest

from controlplane.dispatch.port import ServedModel, Tokenizer
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.upstream.tokenizing import PAUSE_S, RETRY_EVERY, TokenBlocks

SERVED = ServedModel("m", 8192, 0, True, True, tokenizer=Tokenizer("m", 4, "http://one", "", 1e-3))


class Server:
    """Answers each question for tokens with ten of them after *took_s*, or not at all."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.now_s, self.took_s, self.asked, self.fails = 0.0, took_s, [], False

    def post(self, url, data, headers, allow_redirects):
        self.asked.append(msgspec.json.decode(data))
        return self

    async def __aenter__(self):
        self.now_s += self.took_s
        if self.fails:
            raise OSError
        return SimpleNamespace(status=200, read=self.read)

    async def __aexit__(self, *_):
        return None

    async def read(self) -> bytes:
        return msgspec.json.encode({"tokens": list(range(10))})


def blocks_of(server: Server) -> TokenBlocks:
    return TokenBlocks(lambda: server, lambda: server.now_s)


def chat(text: str, **body):
    raw = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}], **body})
    return Call.read(raw, Kind.CHAT, max_depth=50)


async def test_a_prompt_is_asked_for_once_and_salts_divide_its_blocks():
    server = Server()
    blocks = blocks_of(server)
    first = await blocks.of(chat("a longer text"), SERVED)
    assert len(first) == 2 * 8
    assert await blocks.of(chat("a longer text", temperature=0.5), SERVED) == first
    assert (len(server.asked), blocks.reused) == (1, 1)
    assert await blocks.of(chat("a longer text", cache_salt="mine"), SERVED) != first


@pytest.mark.parametrize(
    "call",
    [
        chat("short"),
        chat("a longer text", documents=[{"text": "more"}]),
        chat([{"type": "image_url", "image_url": {"url": "data:,x"}}]),
    ],
)
async def test_what_would_be_computed_otherwise_is_not_asked_for(call):
    server = Server()
    assert await blocks_of(server).of(call, SERVED) == b""
    assert server.asked == []


@pytest.mark.parametrize(("took_s", "asked"), [(0.005, 60), (0.05, 2)])
async def test_it_is_asked_for_while_that_is_faster_than_the_prefill(took_s, asked):
    server = Server(took_s)
    blocks = blocks_of(server)
    for number in range(60):
        await blocks.of(chat(f"text {number} of many"), SERVED)
    assert len(server.asked) == asked
    assert RETRY_EVERY == 50


async def test_a_server_that_does_not_answer_is_left_alone_for_a_while():
    server = Server()
    server.fails = True
    blocks = blocks_of(server)
    for number in range(9):
        assert await blocks.of(chat(f"text {number} of many"), SERVED) == b""
    assert (len(server.asked), blocks.failed) == (3, 3)
    server.now_s, server.fails = PAUSE_S + 1, False
    assert await blocks.of(chat("a longer text"), SERVED) != b""
