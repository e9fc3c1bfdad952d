"""An instance's process is stopped for a while, as by a debugger or a busy machine; two others serve the same model."""

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.dispatch.live_fleet import heartbeats
from tests.gateway.conftest import do_once, gateway_before, until
from tests.gateway.rows import make_rows

pytestmark = [pytest.mark.services, pytest.mark.nightly]
REGION = "east"
TOGETHER = 12


@pytest.fixture
def processes():
    command = [sys.executable, "-m", "workers.emulator", "--port", "0", "--single", "m"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    yield started
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)
        process.stdout.close()


async def test_others_serve_while_one_is_stopped_and_it_comes_back(transactional_db, processes, monkeypatch):
    """C53: its requests, whose answers are whole, move to the others, which are no slower; it fails, and comes back."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(heartbeats, "SLOW_S", 1.0)
    monkeypatch.setattr(heartbeats, "SILENT_S", 5.0)
    do_once(monkeypatch)
    lines = [await asyncio.to_thread(process.stdout.readline) for process in processes]
    urls = [re.search(r"http://[\w.:]+", line)[0] for line in lines]
    backends = [SimpleNamespace(name=f"m-{number}", url=url) for number, url in enumerate(urls)]
    await database_sync_to_async(make_rows)(backends, regions=[REGION] * 3, max_num_seqs=16, queue_bound=1000)
    async with gateway_before(backends) as served:
        took: list[tuple[float, float]] = []
        over = False

        async def ask():
            while not over:
                began_s = time.monotonic()
                async with await served.chat(max_tokens=20, ignore_eos=True) as response:
                    assert response.status == 200, await response.text()
                took.append((began_s, time.monotonic() - began_s))

        asking = [asyncio.create_task(ask()) for _ in range(TOGETHER)]
        await until(lambda: len(took) > 10 * TOGETHER)
        stopped_s = time.monotonic()
        os.kill(processes[0].pid, signal.SIGSTOP)
        assert await served.becomes("failed")
        failed_s = time.monotonic()
        await asyncio.sleep(2.0)
        os.kill(processes[0].pid, signal.SIGCONT)
        assert await served.becomes("ready")
        over = True
        await asyncio.gather(*asking)
        assert failed_s - stopped_s < 5.0 + 3.0
        before = statistics.median(s for began_s, s in took if began_s < stopped_s)
        meanwhile = statistics.median(s for began_s, s in took if stopped_s + 1.5 < began_s < failed_s + 2.0)
        assert meanwhile < 1.5 * before + 0.1
        assert {row.outcome for row in await served.rows()} == {"done"}
        assert sum(row.attempts > 1 for row in await served.rows()) <= TOGETHER
