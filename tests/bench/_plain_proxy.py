"""The least a Python proxy can do: bare ASGI and aiohttp, no key, no queue, no ledger. BACKEND is the port behind it."""

import os

import aiohttp

URL = f"http://127.0.0.1:{os.environ.get('BACKEND', '0')}/v1/chat/completions"
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
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    async with session.post(URL, data=body, headers={"Content-Type": "application/json"}) as response:
        kind = response.headers["Content-Type"].encode()
        await send({"type": "http.response.start", "status": response.status, "headers": [(b"content-type", kind)]})
        async for chunk in response.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
