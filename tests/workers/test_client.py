"""The control client against an emulated server, and against servers that are not there or not vLLM."""

import asyncio

import pytest
from aiohttp import web

from tests.workers.conftest import Emulator, eventually
from workers.vllm.client import VllmClient, VllmError


async def test_nothing_there(unused_tcp_port: int) -> None:
    async with VllmClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        assert not await client.health()
        with pytest.raises(VllmError, match="cannot be reached") as caught:
            await client.metrics()
    assert caught.value.status is None


async def test_a_server_that_hangs(emulator: Emulator) -> None:
    await emulator.ready()
    await emulator.call("POST", "/emulator/instances/one/fault", {"kind": "hang"})
    client = VllmClient(f"{emulator.url}/one", emulator.session, timeout_s=0.1)
    assert not await client.health()
    with pytest.raises(VllmError, match=r"within 0\.1 s") as caught:
        await client.metrics()
    assert caught.value.status is None
    await emulator.call("POST", "/emulator/instances/one/fault", {"kind": "none"})
    await eventually(client.health)


async def test_something_else_answers() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    app.router.add_get("/{tail:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with VllmClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        with pytest.raises(VllmError, match="JSON"):
            await client.version()
        assert (await client.metrics()).model_name == ""
        with pytest.raises(VllmError) as caught:
            await client.sleep()
        assert caught.value.status == 405
    await runner.cleanup()
    await asyncio.sleep(0)
