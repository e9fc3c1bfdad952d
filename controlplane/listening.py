"""The event loop of the web process: `uvicorn --loop controlplane.listening:create_loop`.

libuv accepts one connection of a listening socket in each turn of the loop. With a thousand streams a turn takes ten
milliseconds and more, so of a thousand clients that connect at once the last waited more than ten seconds before its first
byte was read, and so did whoever asked for `/healthz` behind them. Here the same socket is listened to several times over,
and each turn accepts as many.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

import uvloop

ACCEPTED_PER_TURN = 64


class Servers:
    """Several servers on one socket that are closed together."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers

    @property
    def sockets(self) -> Any:
        return self._servers[0].sockets

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def wait_closed(self) -> None:
        for server in self._servers:
            await server.wait_closed()


class Loop(uvloop.Loop):
    async def create_server(self, protocol_factory: Any, *arguments: Any, **options: Any) -> Any:
        """Like uvloop's; accepts up to `ACCEPTED_PER_TURN` connections of each of its sockets in a turn."""
        first = await super().create_server(protocol_factory, *arguments, **options)
        servers = [cast(asyncio.Server, first)]  # uvloop's own class has the same methods
        also = {name: options[name] for name in ("ssl", "backlog") if name in options}
        for listener in list(servers[0].sockets):
            for _ in range(ACCEPTED_PER_TURN - 1):
                again = socket.socket(fileno=os.dup(listener.fileno()))
                more = await super().create_server(protocol_factory, sock=again, **also)
                servers.append(cast(asyncio.Server, more))
        return Servers(servers)


def create_loop() -> asyncio.AbstractEventLoop:
    return Loop()
