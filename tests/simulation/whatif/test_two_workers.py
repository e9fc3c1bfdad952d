"""Two Celery workers as separate processes: one is killed in the middle, and the numbers are those of one worker alone."""

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.simulation.whatif import rows
from tests.simulation.whatif.workers import Place, place

pytestmark = [pytest.mark.services, pytest.mark.nightly]
BODY = {
    "begin": {"kind": "synthetic", "scenario": rows.start()["scenario"] | {"demand": {"duration_h": 3}}},
    "horizon_s": 7200,
    "seeds": 4,
    "futures": [{"preset": "qlm"}, {"name": "More", "changes": [{"kind": "bounds", "model": "m", "min_instances": 3}]}],
}


def runs(where: Place, column: str) -> list[Any]:
    """Return *column* of the runs, in order."""
    with sqlite3.connect(f"file:{where.folder / 'what-if.sqlite3'}?mode=ro", uri=True) as database:
        query = f"SELECT {column} FROM whatif_futureseed ORDER BY future_id, seed"
        return [row[0] for row in database.execute(query)]


def test_a_worker_that_is_killed_changes_no_number(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with place(one) as alone:
        asking = alone.asking(BODY, here=True)
        made, _ = asking.communicate(timeout=500)
        expected = json.loads(made)
        results = [json.loads(each) for each in runs(alone, "result")]
    with place(two) as shared, shared.worker("first") as first, shared.worker("second"):
        asking = shared.asking(BODY)
        while not 2 <= runs(shared, "state").count("done") < 9 if _asked(shared) else True:
            assert asking.poll() is None
            time.sleep(0.05)
        (child, *_) = psutil.Process(first.pid).children()
        child.kill()  # its task is delivered again
        made, _ = asking.communicate(timeout=500)
        states, attempts = runs(shared, "state"), runs(shared, "attempts")
        assert states == ["done"] * 12
        assert sum(attempts) >= 12
        assert [json.loads(each) for each in runs(shared, "result")] == results
    assert json.loads(made)["futures"] == expected["futures"]


def _asked(where: Place) -> bool:
    try:
        return bool(runs(where, "state"))
    except sqlite3.OperationalError:
        return False
