"""The life of emulated servers: start, crash, hang and mend, and the admin surface."""

import asyncio

import aiohttp
import pytest

from tests.workers.conftest import FAST, SLOW, Emulator, body, eventually
from workers.emulator.instance import EmulatedInstance


async def test_unknown_routes_and_methods(emulator: Emulator) -> None:
    await emulator.ready(dev_mode=False, enable_lora=False)
    not_found = (404, {"detail": "Not Found"})
    assert await emulator.call("POST", "/one/v1/embeddings", {"input": "x"}) == not_found
    assert await emulator.call("POST", "/one/sleep") == not_found
    assert await emulator.call("POST", "/one/v1/load_lora_adapter", {}) == not_found
    assert await emulator.call("GET", "/one/v1/completions") == (405, {"detail": "Method Not Allowed"})


async def cut(emulator: Emulator, method: str, path: str, body: object = None) -> None:
    """The connection is closed without an answer."""
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await emulator.call(method, path, body)


async def test_no_answer_until_started(emulator: Emulator) -> None:
    emulator.add(startup_s=0.3)
    await cut(emulator, "GET", "/one/health")
    assert (await emulator.call("GET", "/emulator/instances/one"))[1]["state"] == "starting"
    await eventually(lambda: emulator.fleet.instances["one"].listening)
    assert (await emulator.call("GET", "/one/health"))[0] == 200


async def test_nothing_answers_for_a_missing_server(emulator: Emulator) -> None:
    await cut(emulator, "GET", "/nobody/health")


async def fault(emulator: Emulator, **fields: object) -> None:
    assert (await emulator.call("POST", "/emulator/instances/one/fault", fields))[0] == 200


async def test_crash_cuts_and_put_restarts(emulator: Emulator) -> None:
    instance = await emulator.ready(profile=SLOW)
    plain = asyncio.create_task(emulator.complete(max_tokens=900))
    streamed = await emulator.session.post(
        f"{emulator.url}/one/v1/completions",
        json={"model": "m", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True},
    )
    await streamed.content.readline()
    await fault(emulator, kind="crash")
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        await streamed.read()
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await plain
    await cut(emulator, "GET", "/one/health")
    assert instance.state == "crashed"
    status, answer = await emulator.call("PUT", "/emulator/instances/one", body(profile=SLOW))
    assert (status, answer["created"]) == (200, True)
    await eventually(lambda: emulator.fleet.instances["one"].listening)
    assert (await emulator.metrics()).generation_tokens_total == 0


async def test_crash_for_a_while(emulator: Emulator) -> None:
    await emulator.ready()
    await fault(emulator, kind="crash", for_s=0.05)
    await cut(emulator, "GET", "/one/health")
    await eventually(lambda: emulator.fleet.instances["one"].listening)
    assert (await emulator.complete())[0] == 200


async def test_hang(emulator: Emulator) -> None:
    await emulator.ready()
    task = asyncio.create_task(emulator.complete(max_tokens=200))
    await emulator.in_work(1, 0)
    await fault(emulator, kind="hang")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await emulator.call("GET", "/one/health")
    assert not task.done()
    await fault(emulator, kind="none")
    assert (await task)[0] == 200


async def test_slow(emulator: Emulator) -> None:
    instance = await emulator.ready(profile=SLOW)
    await fault(emulator, kind="slow", factor=5)
    assert instance.fault.factor == 5
    await emulator.complete(max_tokens=3)
    assert (await emulator.metrics()).inside_s_total > 0.29  # two decode steps of five times 30 ms


async def test_errors(emulator: Emulator) -> None:
    await emulator.ready()
    await fault(emulator, kind="errors", ratio=1)
    status, answer = await emulator.complete()
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "InternalServerError", 500)
    assert (await emulator.call("GET", "/one/health"))[0] == 200
    await fault(emulator, kind="errors", ratio=0.5)
    statuses = {(await emulator.complete(max_tokens=1))[0] for _ in range(40)}
    assert statuses == {200, 500}


@pytest.mark.parametrize(
    "fields", [{}, {"kind": "flood"}, {"kind": "slow", "factor": 0}, {"kind": "errors", "ratio": 2}, [], None]
)
async def test_wrong_faults(emulator: Emulator, fields: object) -> None:
    await emulator.ready()
    status, answer = await emulator.call("POST", "/emulator/instances/one/fault", fields)
    assert status == 400
    assert "wrong fault" in answer["error"]


@pytest.mark.parametrize(("late_s", "next_s"), [(0.0, 10.5), (0.2, 10.5), (1.5, 12.0)])
async def test_late_timers_do_not_add_up(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, late_s: float, next_s: float
) -> None:
    """The next step begins at the planned end of this one, unless the server is hopelessly behind."""
    instance = await emulator.ready()
    now = [10.0]

    async def sleep(delay_s: float) -> None:
        now[0] += delay_s + late_s

    monkeypatch.setattr("workers.emulator.instance._clock", lambda: now[0])
    monkeypatch.setattr("workers.emulator.instance.asyncio.sleep", sleep)
    assert await instance._until(10.5) == pytest.approx(next_s)


async def test_instances(emulator: Emulator) -> None:
    status, answer = await emulator.call("PUT", "/emulator/instances/x-1", body())
    assert (status, answer) == (200, {"name": "x-1", "url": f"{emulator.url}/x-1", "created": True})
    assert (await emulator.call("PUT", "/emulator/instances/x-1", body()))[1]["created"] is False
    status, answer = await emulator.call("PUT", "/emulator/instances/x-1", body(max_num_seqs=9))
    assert status == 409
    assert "another specification" in answer["error"]
    (described,) = (await emulator.call("GET", "/emulator/instances"))[1]["instances"]
    assert (described["name"], described["model"], described["running"]) == ("x-1", "m", 0)
    assert described["spec"]["max_num_seqs"] == 4
    assert (await emulator.call("PUT", "/emulator/instances/x-1", described["spec"]))[1]["created"] is False
    assert (await emulator.call("DELETE", "/emulator/instances/x-1"))[0] == 204
    assert (await emulator.call("DELETE", "/emulator/instances/x-1"))[0] == 404
    assert (await emulator.call("GET", "/emulator/instances/x-1"))[0] == 404


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ""}, "model"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"a_wrong_word": 1}, "a_wrong_word"),
        ({"profile": {"decode_a_s": 1}}, "prefill_a_s"),
        ({"profile": {**FAST, "decode_a_s": -1}}, "decode_a_s"),
        ({"kv_blocks": 1}, "fewer than max_model_len"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ],
)
async def test_wrong_specifications(emulator: Emulator, changes: dict[str, object], said: str) -> None:
    status, answer = await emulator.call("PUT", "/emulator/instances/one", body(**changes))
    assert status == 400
    assert said in answer["error"]
    assert not emulator.fleet.instances


@pytest.mark.parametrize("name", ["emulator", "a%20b", "a.b", "-a"])
async def test_wrong_names(emulator: Emulator, name: str) -> None:
    assert (await emulator.call("PUT", f"/emulator/instances/{name}", body()))[0] == 400


async def test_delete_cuts_running_requests(emulator: Emulator) -> None:
    await emulator.ready(profile=SLOW)
    task = asyncio.create_task(emulator.complete(max_tokens=900))
    await emulator.in_work(1, 0)
    assert (await emulator.call("DELETE", "/emulator/instances/one"))[0] == 204
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await task


async def test_a_defect_of_the_engine_is_a_crash_and_is_logged(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance: EmulatedInstance = await emulator.ready()

    def broken(now_s: float) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(instance._engine, "step", broken)
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await emulator.complete()
    assert instance.state == "crashed"
    assert "emulated instance one stopped" in caplog.text


async def test_many_streams_at_once(emulator: Emulator) -> None:
    for name in ("one", "two"):
        await emulator.ready(name, max_num_seqs=64)
    events = await asyncio.gather(*(emulator.stream(name, max_tokens=20) for name in ("one", "two") for _ in range(60)))
    assert [len(e) for e in events] == [20] * 120
