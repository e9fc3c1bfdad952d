"""What holding the queue costs: twice as many streams as a server runs, through the gateway and direct, alternating.

`pytest -m vllm -s tests/vllm/test_holding.py` prints the figures of a real server and keeps them in
`test-results/holding.json`. An emulated one is measured over a link that takes long, which any machine can carry.
"""

import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Deployment
from scheduling.routing.requests_ahead import ENDS
from tests.gateway.conftest import until
from tests.gateway.rows import SECRET
from tests.vllm.conftest import MODEL, ROOT, emulated, profile, slow_server
from tests.vllm.gateway import gateway_before

SLOTS, STREAMS = 16, 32
MEAN_TOKENS = 48
REQUESTS = int(os.environ.get("HOLDING_REQUESTS", "128"))
ROUNDS = 3
ONE_WAY_S = 0.15
SLOWED = ("--hidden-size", "768", "--layers", "8")


@pytest.fixture
def vllm_server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with long steps whose engine leaves the cores to HTTP: as on a GPU, the engine is the bottleneck."""
    folder, sizes = tmp_path_factory.mktemp("holding"), {"max_model_len": 512, "max_num_batched_tokens": 2048}
    with slow_server(vllm_python, folder, *SLOWED, max_num_seqs=SLOTS, **sizes) as url:
        yield url


@pytest.fixture
def emulated_server() -> Iterator[str]:
    """An emulated server with steps of 20 ms."""
    process, url = emulated(max_num_seqs=SLOTS, max_num_queued_reqs=None, profile=profile(0.02, 0.0, 0.02, 0.0))
    with process:
        yield url
        process.terminate()


@asynccontextmanager
async def long_link(url: str) -> AsyncIterator[str]:
    """The server at *url*, at another address, ONE_WAY_S away."""
    parts = urlsplit(url)
    open_ends: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def deliver(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data) if data else writer.close()

        with suppress(OSError):
            while data := await reader.read(65536):
                loop.call_later(ONE_WAY_S, deliver, data)
        loop.call_later(ONE_WAY_S, deliver, b"")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(parts.hostname, parts.port)
        open_ends.extend((writer, inner_writer))
        with suppress(asyncio.CancelledError):  # at the end of the test
            await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))

    link = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{link.sockets[0].getsockname()[1]}{parts.path}"
    finally:
        link.close()
        for end in open_ends:
            end.close()
        await asyncio.gather(*(end.wait_closed() for end in open_ends), return_exceptions=True)


async def load(url: str, seed: int, requests: int) -> dict:
    numbers = map(str, (STREAMS, requests, MEAN_TOKENS, seed))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.vllm.closed_loop", url, SECRET, MODEL, *numbers),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


async def compare(server: str, paths: Sequence[str], requests: int, rounds: int) -> list[dict]:
    """Return results of *paths* by round: direct, gateway (requests ahead as measured), strict (none)."""
    async with gateway_before({"holding": server}, SLOTS, requests_ahead_limit=None) as served:
        gateway, url, topology = served.gateway, served.url, served.gateway.dispatching.topology
        (replica,) = topology.replicas.values()

        async def limit(ahead: int | None) -> None:
            await database_sync_to_async(Deployment.objects.update)(requests_ahead_limit=ahead)
            gateway.dispatching.refresh_now()
            await until(lambda: topology.fleet.ahead_limit[replica.slot] == (-1 if ahead is None else ahead))

        async def one(path: str, seed: int, count: int) -> dict:
            if path == "direct":
                return await load(server, seed, count)
            await limit(0 if path == "strict" else None)
            measured = await load(url, seed, count)
            ends = float(topology.fleet.round_trips[replica.slot, ENDS])
            return measured | {"round_trip_ms": topology.round_trip_ms(replica), "ends_in_a_trip": ends}

        for path in paths:  # what is compiled, connected and measured first
            await one(path, 99, 2 * STREAMS)
        measured_rounds = []
        for seed in range(rounds):
            measured_rounds.append({path: await one(path, seed, requests) for path in paths})
            print(json.dumps(measured_rounds[-1]))
        return measured_rounds


def ratio(measured_rounds: list[dict], name: str, path: str = "gateway") -> float:
    """Return the median of *path* relative to direct."""
    return statistics.median(row[path][name] / row["direct"][name] for row in measured_rounds)


def keep(report: dict) -> None:
    folder = ROOT / "test-results"
    folder.mkdir(exist_ok=True)
    (folder / "holding.json").write_text(json.dumps(report, indent=2))


@pytest.mark.vllm
async def test_holding_the_queue_costs_no_throughput(transactional_db, vllm_server, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    measured_rounds = await compare(vllm_server, ("direct", "gateway"), REQUESTS, ROUNDS)
    tokens, e2e = ratio(measured_rounds, "tokens_per_s"), ratio(measured_rounds, "e2e_p50_ms")
    print(f"{STREAMS} streams, {SLOTS} slots: tokens/s {tokens:.3f} of direct, E2E p50 {e2e:.3f} of direct")
    keep(
        {
            "streams": STREAMS,
            "slots": SLOTS,
            "tokens_per_s_ratio": tokens,
            "e2e_p50_ratio": e2e,
            "rounds": measured_rounds,
        }
    )
    # The aim is 0.95, and what is measured on a quiet machine is above it; one round on two cores is off by 0.07 either way.
    assert tokens >= 0.9
    assert e2e <= 1.15


@pytest.mark.nightly
async def test_over_a_long_link_no_slot_is_idle(transactional_db, emulated_server, monkeypatch):
    """0.3 s there and back, with requests of 1 s: the measured round trip, and its effect."""
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    async with long_link(emulated_server) as server:
        measured_rounds = await compare(server, ("direct", "gateway", "strict"), 96, 1)
    (row,) = measured_rounds
    assert 2 * ONE_WAY_S * 1000 * 0.9 < row["gateway"]["round_trip_ms"] < 2 * ONE_WAY_S * 1000 * 2
    assert row["gateway"]["ends_in_a_trip"] > 2
    assert ratio(measured_rounds, "tokens_per_s", "strict") < 0.85
    assert ratio(measured_rounds, "tokens_per_s") > 0.92
