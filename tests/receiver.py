"""A receiver of webhooks of every temper."""

import asyncio
from contextlib import asynccontextmanager

import orjson
from aiohttp import web


class Receiver:
    """A web server that does what a path says, and keeps what it was sent."""

    def __init__(self) -> None:
        self.taken: list[dict] = []
        self.sent: list[tuple[bytes, dict[str, str]]] = []
        """Bodies and headers of all calls."""

    @property
    def calls(self) -> int:
        return len(self.sent)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.sent.append((await request.read(), dict(request.headers)))
        match request.path:
            case "/fails":
                return web.Response(status=500, text="no")
            case "/redirects":
                return web.Response(status=302, headers={"Location": "/takes"})
            case "/hangs":
                await asyncio.sleep(60)
            case "/drips":
                answer = web.StreamResponse()
                await answer.prepare(request)
                while True:
                    await answer.write(b"x" * 65536)
        self.taken.append(orjson.loads(self.sent[-1][0]))
        return web.Response(text="ok")


@asynccontextmanager
async def receiver():
    one = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path}", one._take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield one, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
