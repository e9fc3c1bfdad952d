"""A background task that dies is said: every task of the product that nothing awaits is made by `background.spawn`."""

import ast
import asyncio
from collections import Counter
from pathlib import Path

import pytest

from controlplane import background
from tests.gateway.conftest import gateway_options, served

__all__ = ["gateway_options", "served"]

ROOT = Path(__file__).parent.parent
MAKES = {"create_task", "ensure_future", "run_coroutine_threadsafe"}

# By module: calls whose task its maker awaits, or whose error it looks at.
AWAITED = {
    "controlplane/background.py": 1,
    "controlplane/console/live/feed.py": 1,
    "controlplane/dispatch/live_fleet/heartbeats.py": 1,
    "controlplane/dispatch/live_fleet/kv_caches.py": 1,
    "controlplane/gateway/upstream/adapters.py": 1,
    "workers/traffic/__main__.py": 1,
    "controlplane/supervisor/child.py": 1,
    "controlplane/supervisor/stack.py": 2,
    "forecasting/lengths/predictor.py": 3,  # its own process is watched, and started again
    "workers/emulator/instance.py": 1,  # no part of a real fleet, as the next
    "workers/emulator/kv_events.py": 1,
    "workers/traffic/waves.py": 3,  # of its own TaskGroup
}


def bare(source: str) -> int:
    """Return the number of tasks that *source* makes by itself; those of a TaskGroup are awaited by it."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    makers = (call.func for call in calls)
    return sum(
        isinstance(maker, ast.Attribute)
        and maker.attr in MAKES
        and not (isinstance(maker.value, ast.Name) and maker.value.id == "group")
        for maker in makers
    )


def test_every_other_task_is_awaited_by_its_maker():
    counts = {}
    for package in ("controlplane", "scheduling", "forecasting", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            if count := bare(path.read_text()):
                counts[str(path.relative_to(ROOT))] = count
    assert counts == AWAITED


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("asyncio.create_task(work())", 1),
        ("x = loop.create_task(work())\nasyncio.ensure_future(y)", 2),
        ("group.create_task(work())", 0),
        ("spawn(work(), 'name')", 0),
    ],
)
def test_a_bare_task_is_found(source, count):
    assert bare(source) == count


@pytest.fixture
def dead(monkeypatch):
    monkeypatch.setattr(background, "dead", Counter())
    return background.dead


async def test_a_task_that_dies_is_logged_and_counted_and_one_that_is_cancelled_is_not(dead, caplog):
    async def work(error: type[BaseException] | None) -> None:
        await asyncio.sleep(0)
        if error:
            raise error

    tasks = [background.spawn(work(error), "look") for error in (ValueError, KeyError, None, asyncio.CancelledError)]
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert dead == {"look": 2}
    assert background.summary() == "look (2 times)"
    assert [record.getMessage() for record in caplog.records] == [
        "look: a background task died: ValueError",
        "look: a background task died: KeyError",
    ]


async def test_readyz_the_page_and_the_metrics_say_it(dead, served):
    async def work() -> None:
        raise ZeroDivisionError

    await asyncio.gather(background.spawn(work(), "ledger"), return_exceptions=True)
    await asyncio.sleep(0)
    async with served.http.get(f"{served.url}/readyz") as response:
        assert response.status == 200, "it serves on"
        assert (await response.json())["checks"]["tasks"] == "died: ledger"
    async with served.http.get(f"{served.url}/metrics") as response:
        assert 'pilothouse_dead_tasks_total{task="ledger"} 1.0' in await response.text()
    parts = {part.name: part for part in served.gateway.monitor.parts()}
    assert parts["web"].state == "warning"
    assert parts["web"].detail.endswith("ledger")
