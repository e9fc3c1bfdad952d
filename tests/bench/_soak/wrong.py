"""Faulty requests, and clients that leave in the middle of one."""

import asyncio
import json
from typing import Any

import aiohttp

from tests.bench._soak.mix import TOOLS, Kind, Mix, topic
from tests.bench._soak.seen import End, Seen

CHAT = "/v1/chat/completions"
TOO_LARGE_BYTES = 5 * 2**20


async def raw(mix: Mix, seen: Seen, body: bytes, *, path: str = CHAT, method: str = "POST", **headers: str) -> None:
    """Send *body* without an SDK; record the status and the error code."""
    given = {
        "Authorization": f"Bearer {mix.keys['acme']}",
        "Content-Type": "application/json",
        "X-Request-Id": seen.request_id,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.request(method, mix.url + path, data=body, headers=given) as response,
        ):
            answer = await response.read()
    except aiohttp.ClientConnectorError as error:
        seen.end, seen.why = End.UNREACHED, str(error)[:200]
        return
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.end, seen.why = End.CUT, f"{type(error).__name__}: {error}"[:200]
        return
    seen.end, seen.status = End.REFUSED, response.status
    assert response.headers["X-Request-Id"] == seen.request_id
    if response.status == 200:
        seen.done()
        return
    seen.code = str(json.loads(answer)["error"]["code"] or "")


def body(mix: Mix, seen: Seen, **more: Any) -> bytes:
    asked = {"model": "llama-3.2-3b", "messages": topic(mix), "max_tokens": 16, **more}
    seen.model = asked["model"]
    return json.dumps(asked).encode()


async def bad_json(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, mix.draw.choice((b"", b"{", b"[1, 2]", b'{"model": "llama-3.2-3b", }', b"\xff\xfe{}")))


async def bad_parameter(mix: Mix, seen: Seen) -> None:
    wrong = mix.draw.choice(
        (
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"messages": []},
            {"messages": [{"content": "no role"}]},
            {"n": 0},
            {"stream": "perhaps"},
            {"stream_options": {"include_usage": True}},
            {"stop": [1]},
            {"min_tokens": 99},
        )
    )
    await raw(mix, seen, body(mix, seen, **wrong))


async def too_deep(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, body(mix, seen, extra=json.loads("[" * 600 + "]" * 600)))


async def unknown_model(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, body(mix, seen, model=mix.draw.choice(("gpt-4o", "llama", "../etc"))))


async def too_large(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, b" " * TOO_LARGE_BYTES)


async def wrong_key(mix: Mix, seen: Seen) -> None:
    keys = ("Bearer ph_wrong", "Basic dTpw", "Bearer", "")
    await raw(mix, seen, body(mix, seen), Authorization=mix.draw.choice(keys))


async def unknown_class(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, body(mix, seen), X_SLO_Class="gold")


async def forbidden_class(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, body(mix, seen), X_SLO_Class="interactive", Authorization=f"Bearer {mix.keys['globex']}")


async def wrong_path(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, body(mix, seen), path=mix.draw.choice(("/v1/embeddings", "/v1/audio/speech", "/v1/")))


async def wrong_method(mix: Mix, seen: Seen) -> None:
    await raw(mix, seen, b"", method="GET")


async def too_long(mix: Mix, seen: Seen) -> None:
    """Exceed the model's context, which only the instance knows; the gateway passes its message on."""
    ids = [7] * 5000
    asked = json.dumps({"model": "llama-2-70b", "prompt": ids, "max_tokens": 16}).encode()
    seen.model = "llama-2-70b"
    await raw(mix, seen, asked, path="/v1/completions")


async def tools_refused(mix: Mix, seen: Seen) -> None:
    """Choose a tool that is not among those given."""
    choice = {"type": "function", "function": {"name": "no_such_tool"}}
    await raw(mix, seen, body(mix, seen, tools=TOOLS, tool_choice=choice))


async def half_body(mix: Mix, seen: Seen) -> None:
    """Leave with half of the body sent."""
    whole = body(mix, seen)
    await _by_hand(mix, seen, whole[: len(whole) // 2], len(whole))
    seen.end = End.NEVER_SENT


async def asks_and_goes(mix: Mix, seen: Seen) -> None:
    """Leave as soon as the request is sent."""
    whole = body(mix, seen, stream=mix.draw.random() < 0.5, max_tokens=400)
    seen.unread = True
    await _by_hand(mix, seen, whole, len(whole))
    seen.left()


async def _by_hand(mix: Mix, seen: Seen, sent: bytes, announced: int) -> None:
    host, _, port = mix.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {mix.keys['acme']}\r\n"
        f"Content-Type: application/json\r\nX-Request-Id: {seen.request_id}\r\nContent-Length: {announced}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    await writer.drain()
    await asyncio.sleep(mix.draw.random() * 0.3)
    writer.close()
    await writer.wait_closed()


def refused(*statuses: int) -> frozenset[int]:
    return frozenset(statuses)


KINDS = (
    Kind("bad JSON", 0.3, bad_json, refused(400)),
    Kind("bad parameter", 0.4, bad_parameter, refused(400)),
    Kind("too deep", 0.2, too_deep, refused(400)),
    Kind("unknown model", 0.3, unknown_model, refused(404)),
    Kind("too large", 0.1, too_large, refused(413)),
    Kind("wrong key", 0.3, wrong_key, refused(401)),
    Kind("unknown class", 0.2, unknown_class, refused(400)),
    Kind("forbidden class", 0.2, forbidden_class, refused(403)),
    Kind("wrong path", 0.2, wrong_path, refused(404)),
    Kind("wrong method", 0.2, wrong_method, refused(405)),
    Kind("too long", 0.3, too_long, refused(400)),
    Kind("tools refused", 0.3, tools_refused, refused(400)),
    Kind("half a body", 0.4, half_body),
    Kind("asks and goes", 0.8, asks_and_goes),
)
