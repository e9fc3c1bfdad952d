"""LoRA adapters at servers: loaded before the first request that uses one, unloaded when the dispatcher says so.

Calls to one server are made one after the other, in the order of the dispatcher's decisions, so that an adapter which is
unloaded and soon used again is loaded.
"""

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from controlplane.background import spawn
from controlplane.dispatch.port import Placed, Warm
from controlplane.gateway.errors import ApiError
from workers.vllm.client import VllmClient, VllmError

LOAD_S = 60.0
"""Longest load of an adapter, from a slow storage or a repository."""
MAX_SERVERS = 10_000
LOADED_ALREADY = "already been loaded"

ServerKey = tuple[str, float, str]
"""Instance, start and address."""


class AdapterUnavailable(ApiError):
    """The server cannot load the adapter."""


class _Server:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.loads: dict[str, asyncio.Task[None]] = {}
        """By adapter; done once it is loaded."""


class Adapters:
    """*session* provides the connections."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._session = session
        self._servers: dict[ServerKey, _Server] = {}
        self._unloads: set[asyncio.Task[None]] = set()

    def note(self, placed: Placed | Warm) -> None:
        """Begin to load the adapter of *placed*, and to unload those that leave for it. Call in the order of decisions."""
        server = self._server(placed)
        load = server.loads.get(placed.adapter)
        again = isinstance(placed, Warm) and placed.again
        if load is None or again or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = server.loads[placed.adapter] = asyncio.create_task(self._load(server, placed, again=again))
            load.add_done_callback(_look)
        for name in placed.unload:
            if server.loads.pop(name, None) is not None:
                unload = spawn(self._unload(server, placed, name), "unload adapter")
                self._unloads.add(unload)
                unload.add_done_callback(self._unloads.discard)

    async def ready(self, placed: Placed | Warm) -> None:
        """Wait until the adapter of *placed* is loaded. Raises AdapterUnavailable, or OSError without an answer."""
        load = self._server(placed).loads.get(placed.adapter)
        if load is not None:
            await asyncio.shield(load)

    def forget(self, placed: Placed | Warm) -> None:
        """Load the adapter of *placed* again next time: the server does not know it."""
        self._server(placed).loads.pop(placed.adapter, None)

    async def stop(self) -> None:
        """Cancel what is in progress."""
        tasks = [*self._unloads, *(load for server in self._servers.values() for load in server.loads.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _server(self, placed: Placed | Warm) -> _Server:
        key = (placed.instance, placed.ready_at, placed.url)
        if key not in self._servers:
            if len(self._servers) >= MAX_SERVERS:  # instances come and go: bound the memory
                self._servers.clear()
            self._servers[key] = _Server()
        return self._servers[key]

    def _client(self, placed: Placed | Warm) -> VllmClient:
        return VllmClient(placed.url, self._session(), api_key=placed.api_key, timeout_s=LOAD_S)

    async def _load(self, server: _Server, placed: Placed | Warm, *, again: bool) -> None:
        async with server.lock:
            try:
                await self._client(placed).load_lora_adapter(placed.adapter, placed.adapter_source, in_place=again)
            except VllmError as error:
                if error.status == 400 and LOADED_ALREADY in str(error):
                    return
                if error.status is None:
                    raise ConnectionError(str(error)) from error
                raise AdapterUnavailable(
                    503,
                    f"The adapter {placed.adapter!r} could not be loaded: {_said(error)}",
                    code="adapter_unavailable",
                ) from error

    async def _unload(self, server: _Server, placed: Placed | Warm, name: str) -> None:
        async with server.lock:
            with contextlib.suppress(VllmError):  # it is gone, or its server is
                await self._client(placed).unload_lora_adapter(name)


def _look(load: asyncio.Task[None]) -> None:
    """Look at the error of a load that nothing waits for: the next request that needs the adapter tries again."""
    if not load.cancelled():
        load.exception()


def _said(error: VllmError) -> str:
    """Return what the server said, without its address."""
    return str(error).partition(" answered ")[2] or "the server refused"
