"""Demo traffic: waves that move from region to region, bounded, and not put off by a gateway that goes away."""

import asyncio
import logging

import pytest
from aiohttp import web

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.fleet.models import SloClass, SloKind
from scheduling.applications.suite import SUITE
from tests.supervisor.conftest import until
from tests.traffic.conftest import FakeGateway
from workers.emulator.text import count_tokens
from workers.traffic import waves
from workers.traffic.__main__ import KEY_NAME, new_key
from workers.traffic.waves import BURST_FACTOR, DAY_S, KINDS, NIGHT, Kind, Stream, Waves, streams

ENDPOINTS = [("llama", "us-west", 4096), ("llama", "us-east", 4096), ("bloom", "us-east", 2048)]


def busy(gateway: FakeGateway, **changes: object) -> Waves:
    """A hundred requests a second, most of them streamed."""
    kind = Kind(peak_per_s=100.0, prompt_tokens=50, output_tokens=5, streamed=0.5)
    values = {"model": "m", "region": "us-east", "slo_class": "interactive", "key": "good", "context_tokens": 60}
    return Waves(gateway.url, [Stream(**{**values, "phase": 0.25, "kind": kind, **changes})], seed=1)  # type: ignore[arg-type]


def test_a_stream_for_each_endpoint_and_class_with_a_key() -> None:
    made = streams(ENDPOINTS, {"interactive": "a", "opportunistic": "b"})
    assert len(made) == 6
    assert {(stream.slo_class, stream.key) for stream in made} == {("interactive", "a"), ("opportunistic", "b")}
    assert {stream.region: stream.phase for stream in made} == {"us-east": 0.0, "us-west": 0.5}


def test_the_rate_goes_up_and_down_and_the_regions_alternate() -> None:
    east, west = (s for s in streams(ENDPOINTS[:2], {"interactive": "a"}))
    moments = [DAY_S * step / 100 for step in range(100)]
    peak = KINDS["interactive"].peak_per_s
    for stream in (east, west):
        rates = [stream.rate_per_s(moment, burst=False) for moment in moments]
        assert max(rates) == pytest.approx(peak, rel=0.01)
        assert min(rates) == pytest.approx(peak * NIGHT, rel=0.01)
    noon = max(moments, key=lambda moment: east.rate_per_s(moment, burst=False))
    assert west.rate_per_s(noon, burst=False) == pytest.approx(peak * NIGHT, rel=0.01)
    assert east.rate_per_s(noon, burst=True) == pytest.approx(peak * BURST_FACTOR, rel=0.01)


async def test_requests_fit_the_model_and_say_where_they_come_from(gateway: FakeGateway) -> None:
    run = asyncio.create_task((source := busy(gateway)).run())
    await until(lambda: source.done >= 40)
    run.cancel()
    await asyncio.wait([run])
    assert run.cancelled()
    assert all(0 < count_tokens(body["prompt"]) <= 60 - body["max_tokens"] for body in gateway.bodies)
    assert not any("ignore_eos" in body for body in gateway.bodies)
    assert {body["stream"] for body in gateway.bodies} == {True, False}
    assert {headers["X-Region"] for headers in gateway.headers} == {"us-east"}
    assert {headers["X-SLO-Class"] for headers in gateway.headers} == {"interactive"}


async def test_a_job_is_sent_at_once_and_again(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    source = busy(gateway, slo_class="opportunistic", share=1e-6, phase=0.0, job=7)
    monkeypatch.setattr(waves, "JOB_FIRST_S", 0.0)
    monkeypatch.setattr(waves, "JOB_EVERY_S", 0.5)
    gateway.hold = asyncio.Event()
    run = asyncio.create_task(source.run())
    await gateway.has_open(7)
    assert source.sent == 7
    await gateway.has_open(14)
    gateway.hold.set()
    await until(lambda: source.done >= 14)
    run.cancel()
    await asyncio.wait([run])
    assert {headers["X-SLO-Class"] for headers in gateway.headers} == {"opportunistic"}


async def test_runs_of_applications_follow_their_steps(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls name application, run and unit; a step's calls come after those of the step before it, and a failure ends it."""
    source = busy(gateway, context_tokens=4096, region="us-east", share=1e-6, runs=True)
    monkeypatch.setattr(waves, "RUN_EVERY_S", 1.0)

    async def no_flow(*_: object) -> None: ...

    monkeypatch.setattr(Waves, "_flow", no_flow)
    monkeypatch.setattr(waves, "SUITE", {"CC": SUITE["CC"], "CG": SUITE["CG"]})
    real_sleep = asyncio.sleep
    monkeypatch.setattr(waves.asyncio, "sleep", lambda seconds: real_sleep(min(seconds, 0.01)))
    run = asyncio.create_task(source.run())
    await until(lambda: source.runs_done >= 3)

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    gateway.answer = refuse
    await until(lambda: sum(body.get("outcome") == "failed" for _, body in gateway.reports) >= 3)
    run.cancel()
    await asyncio.wait([run])
    by_run: dict[str, list[str]] = {}
    for headers, body in zip(gateway.headers, gateway.bodies, strict=True):
        assert headers["X-Application"] in {"CC", "CG"}
        assert headers["X-Run-Deadline"] in {"120", "600"}
        assert len(body["prompt"]) + body["max_tokens"] <= 4096
        by_run.setdefault(headers["X-Run"], []).append(headers["X-Unit"])
    whole = [units for units in by_run.values() if units[0] == "write-tests" and len(units) > 1]
    assert whole
    assert all(units == ["write-tests", *["write-solutions"] * 3] for units in whole)
    assert any(len(units) == 1 for units in by_run.values()), "a run whose first call was refused went on"
    closed = {path.split("/")[0]: body["outcome"] for path, body in gateway.reports if path.endswith("/close")}
    assert set(closed.values()) == {"done", "failed"}
    checked = [name for name in closed if closed[name] == "done" and name.startswith("CC-")]
    for name in checked:
        units = [
            (body["unit"], body["kind"], body["state"]) for path, body in gateway.reports if path == f"{name}/units"
        ]
        assert units == [("execute", "container", state) for state in ("running", "done") for _ in range(3)]
    assert checked


async def test_open_requests_are_bounded(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "MAX_OPEN", 5)
    gateway.hold = asyncio.Event()
    run = asyncio.create_task(busy(gateway).run())
    await gateway.has_open(5)
    await asyncio.sleep(0.2)
    assert gateway.most_open == 5
    run.cancel()
    await asyncio.wait([run])


async def test_a_gateway_that_goes_away_and_comes_back(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waves, "QUIET_S", 0.01)

    async def away(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    gateway.answer = away
    source = busy(gateway)
    with caplog.at_level(logging.WARNING, logger=waves.logger.name):
        run = asyncio.create_task(source.run())
        await until(lambda: source.sent >= 20)
        assert source.done == 0
        gateway.answer = None
        await until(lambda: source.done >= 5)
    run.cancel()
    await asyncio.wait([run])
    said = [record.getMessage() for record in caplog.records if record.name == waves.logger.name]
    assert len(said) == 1  # once, not for every request
    assert "keeps trying" in said[0]


@pytest.mark.django_db
def test_its_key_is_replaced_and_the_old_one_ends() -> None:
    slo_class = SloClass.objects.create(name="batch", title="B", kind=SloKind.NON_INTERACTIVE, deadline_s=60)
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)
    first, second = new_key(tenant), new_key(tenant)
    keys = {key.sha256: key for key in ApiKey.objects.filter(tenant=tenant, name=KEY_NAME)}
    assert not keys[hash_secret(first)].usable
    assert keys[hash_secret(second)].usable
