"""A background task that dies is said: every task of the product that nothing awaits is made by `background.spawn`."""

import asyncio
from collections import Counter

import pytest

from controlplane import background
from tests.gateway.conftest import gateway_options, served

__all__ = ["gateway_options", "served"]


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
