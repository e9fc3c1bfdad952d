"""Minimal Python proxy: bare ASGI and aiohttp, without keys, queue or ledger. BACKENDS are the URLs behind it."""

import itertools
import os

import aiohttp

URLS = itertools.cycle(f"{url}/v1/chat/completions" for url in os.environ.get("BACKENDS", "").split(","))
session = None


async def app(scope, receive, send):
    global session  # noqa: PLW0603
    if scope["type"] != "http":
        message = await receive()
        if message["type"] == "lifespan.startup":
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            await send({"type": "lifespan.startup.complete"})
        await receive()
        await session.close()
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/healthz":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    async with session.post(next(URLS), data=body, headers={"Content-Type": "application/json"}) as response:
        kind = response.headers["Content-Type"].encode()
        await send({"type": "http.response.start", "status": response.status, "headers": [(b"content-type", kind)]})
        async for chunk in response.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
