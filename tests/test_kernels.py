"""What was compiled is not loaded again until a source, the processor or a kernel on disk has changed; one process works."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from controlplane import kernels
from scheduling import compiling
from scheduling.compiled import compiled


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text("")
    monkeypatch.setattr(kernels, "sources", lambda: [source])
    kernels.state.cache_clear()
    yield source
    kernels.state.cache_clear()


@pytest.fixture
def kernel(source):
    kernel = source.parent / "cache" / "kernels-source-0" / "kernel.nbc"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("")
    kernels.note_done(kernels.stamp(kernels.base(), "simulation"), kernels.kept(0.0))
    return kernel


def done():
    kernels.state.cache_clear()
    return "simulation" not in kernels.missing()


def test_it_is_done_once(source, kernel):
    assert done()
    assert kernels.missing() == ["requests"]
    (kernel.parent / "another.nbc").write_text("")  # what a test compiled for itself
    assert done()
    os.utime(source, (1.0, 1.0))  # another checkout of the same sources
    assert done()
    kernels.stamp(kernels.base(), "simulation").unlink()
    assert not done()


@pytest.mark.parametrize("change", ["source", "kernel", "processor"])
def test_what_changed_is_compiled_again(source, kernel, change, monkeypatch):
    assert done()
    if change == "source":
        source.write_text("# changed")
    elif change == "kernel":
        kernel.unlink()
    else:
        monkeypatch.setattr(kernels, "processor", lambda: "another")
    assert not done()


def test_every_group_has_parts_and_every_package_a_group():
    assert tuple(kernels.PARTS) == compiling.GROUPS
    assert compiling.group_of("scheduling.simulation.cluster.loop") == "simulation"
    assert compiling.group_of("scheduling.dispatch") == "requests"
    assert compiling.group_of("forecasting.lengths.kernels") == "requests"


def test_parts_run_in_separate_processes_and_a_failure_is_not_success(source, monkeypatch):
    monkeypatch.setitem(kernels.PARTS, "simulation", {"nothing": lambda: None})
    assert kernels.compile_group("simulation") != 0  # the process that it starts knows no such part
    assert not done()
    assert kernels.progress() is None


def test_where_nothing_can_be_kept_nothing_is_compiled_ahead(source, monkeypatch):
    source.with_name("a file").write_text("")
    monkeypatch.setattr(kernels, "cache_bases", lambda _: [source.with_name("a file") / "below"])
    assert kernels.base() is None
    assert kernels.compile_group("simulation") == 0
    assert kernels.progress() is None
    assert kernels.missing() == list(compiling.GROUPS)


def test_unknown_groups_are_named(capsys):
    assert kernels.main(["simulatoin"]) == 2
    assert "No group of kernels is named simulatoin; there are requests, simulation" in capsys.readouterr().err


HOLDER = """
import sys, time
from pathlib import Path
from scheduling.compiling import compiling
with compiling(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(source):
    """Another process that compiles kernels of requests until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(kernels.base()), "requests"]
    process = subprocess.Popen(command, cwd=kernels.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.communicate()


def until(condition):
    end_s = time.monotonic() + 20.0
    while not (now := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return now


def test_a_compiling_process_reports_its_progress(holder):
    now = until(kernels.progress)
    assert (now.group, now.process_id, now.kernels) == ("requests", holder.pid, 0)
    (kernels.base() / "kernels-new").mkdir()
    (kernels.base() / "kernels-new" / "one.nbc").write_text("")
    assert str(until(lambda: (now := kernels.progress()).kernels and now)).startswith(
        "kernels of requests are being compiled, 1 so far"
    )
    holder.communicate("\n")
    assert kernels.progress() is None


def test_a_process_that_dies_while_compiling_blocks_no_other(holder):
    until(kernels.progress)
    holder.kill()
    holder.wait()
    assert kernels.progress() is None


def nothing():
    return 7


def test_a_kernel_that_another_process_compiles_is_waited_for(holder, caplog):
    """And is there as soon as it lies on disk, or as nobody compiles any more."""
    until(kernels.progress)
    folder = kernels.base() / "kernels-some"
    folder.mkdir()
    with caplog.at_level(logging.WARNING, "scheduling.compiling"):
        waiting = threading.Thread(target=compiling.wait_for, args=(nothing, folder))
        waiting.start()
        until(lambda: caplog.records)
    assert f"nothing waits for process {holder.pid}: kernels of requests are being compiled" in caplog.text
    assert waiting.is_alive()
    (folder / "test_kernels.nothing-1.py311.nbi").write_text("")
    waiting.join(20.0)
    assert not waiting.is_alive()
    other = threading.Thread(target=compiling.wait_for, args=(until, folder))
    other.start()
    holder.communicate("\n")
    other.join(20.0)
    assert not other.is_alive()


def test_kernels_of_other_groups_and_of_one_that_compiles_do_not_wait(holder, monkeypatch):
    until(kernels.progress)
    folder = kernels.base() / "kernels-some"
    folder.mkdir()
    monkeypatch.setattr(nothing, "__module__", "scheduling.simulation.simulator")
    compiling.wait_for(nothing, folder)
    monkeypatch.undo()
    monkeypatch.setenv(compiling.COMPILES, "1")
    compiling.wait_for(nothing, folder)
    compiling.wait_for(nothing, None)  # one that is kept nowhere
    assert compiled(nothing)() == 7
