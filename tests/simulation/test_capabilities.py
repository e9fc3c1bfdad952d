"""What an instance serves is measured once by all processes that need it, and is the same as if each had measured it."""

import fcntl
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from controlplane.simulation import capabilities
from controlplane.simulation.capabilities import KEPT_S, Measurement, measured
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Promise
from tests.scheduling.planning.test_simulated_capability import ENGINE

LENGTHS = np.full(20, 100, np.int32).tobytes(), np.full(20, 20, np.int32).tobytes()


def measurement(engine: EngineConfig = ENGINE, cv: float = 1.0) -> Measurement:
    return Measurement(engine, *LENGTHS, Promise(ttft_s=2.0), 95.0, cv, (1, 2), 1.1)


@pytest.fixture
def wanted() -> dict[str, Measurement]:
    return {one.name: one for one in (measurement(cv=cv) for cv in (1.0, 1.5, 2.0))}


@pytest.fixture
def made(monkeypatch) -> list[float]:
    """Return the CV of each capability that was measured here."""
    cvs: list[float] = []
    original = Measurement.made
    monkeypatch.setattr(Measurement, "made", lambda self: cvs.append(self.cv) or original(self))
    return cvs


def test_measured_capabilities_are_read_again(tmp_path, wanted, made):
    first = measured(wanted, tmp_path)
    assert made == [1.0, 1.5, 2.0]
    assert measured(wanted, tmp_path) == first == {name: one.made() for name, one in wanted.items()}
    assert len(made) == 6  # three more for the comparison


def test_all_that_it_depends_on_is_in_its_name(monkeypatch):
    names = {measurement().name, measurement(cv=1.5).name}
    names.add(measurement(ENGINE.__class__(**{**vars_of(ENGINE), "max_num_seqs": 7})).name)
    names.add(Measurement(ENGINE, *reversed(LENGTHS), Promise(ttft_s=2.0), 95.0, 1.0, (1, 2), 1.1).name)
    assert len(names) == 4
    monkeypatch.setattr(capabilities, "_code", lambda: "another version")
    assert measurement().name not in names


def vars_of(engine: EngineConfig) -> dict[str, object]:
    return {name: getattr(engine, name) for name in engine.__dataclass_fields__}


def test_a_file_that_was_not_written_to_its_end_is_measured_again(tmp_path, wanted, made):
    first = measured(wanted, tmp_path)
    file = tmp_path / next(iter(wanted))
    file.write_text(file.read_text()[:30])
    assert measured(wanted, tmp_path) == first
    assert made == [1.0, 1.5, 2.0, 1.0]
    assert measured(wanted, tmp_path) == first


@pytest.mark.nightly
def test_without_a_folder_all_is_measured(tmp_path, wanted, made):
    (tmp_path / "file").write_text("")
    assert list(measured(wanted, tmp_path / "file")) == list(wanted)
    assert made == [1.0, 1.5, 2.0]


@pytest.mark.nightly
def test_files_of_an_hour_ago_go(tmp_path, wanted):
    old = tmp_path / "old"
    old.write_text("{}")
    os.utime(old, (time.time() - KEPT_S - 1,) * 2)
    measured(wanted, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(wanted)


def test_what_another_is_at_is_left_to_it_and_read_in_the_end(tmp_path, wanted, made):
    """Another process measures the first of them, and writes it while this one measures the others."""
    first, *others = wanted
    answer = measured({first: wanted[first]}, tmp_path)
    text = (tmp_path / first).read_text()
    made.clear()
    with open(tmp_path / first, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def write() -> None:
            while len(made) < len(others):
                time.sleep(0.01)
            file.write(text)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)

        other = threading.Thread(target=write)
        other.start()
        both = measured(wanted, tmp_path)
        other.join()
    assert both[first] == answer[first]
    assert made == [1.5, 2.0]


@pytest.mark.nightly
def test_one_whose_process_was_killed_is_measured_here(tmp_path, wanted, made):
    first = next(iter(wanted))
    locked = multiprocessing.get_context("spawn").Event()
    other = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path / first, locked))
    other.start()
    assert locked.wait(60)
    threading.Timer(0.5, other.kill).start()
    assert measured({first: wanted[first]}, tmp_path)
    other.join()
    assert made == [1.0]


def hold(path: Path, locked: "threading.Event") -> None:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        locked.set()
        time.sleep(60)
