"""What was compiled is not loaded again, until a source, the processor or a kernel on disk has changed."""

import os

import pytest

from tests import compile_kernels


@pytest.fixture
def stamp(tmp_path, monkeypatch):
    source, kernel = tmp_path / "source.py", tmp_path / "kernel.nbc"
    for file in (source, kernel):
        file.write_text("")
    monkeypatch.setattr(compile_kernels, "sources", lambda: [source])
    monkeypatch.setattr(compile_kernels, "kept", lambda: {str(path) for path in tmp_path.glob("*.nbc")})
    stamp = tmp_path / "stamp"
    compile_kernels.note_done(stamp)
    return stamp


def test_it_is_done_once(stamp):
    assert compile_kernels.is_done(stamp)
    (stamp.parent / "another.nbc").write_text("")  # what a test compiled for itself
    assert compile_kernels.is_done(stamp)
    stamp.unlink()
    assert not compile_kernels.is_done(stamp)


def test_a_source_saved_again_is_compiled_again(stamp):
    os.utime(stamp.parent / "source.py", (1.0, 1.0))
    assert not compile_kernels.is_done(stamp)


def test_a_kernel_that_was_removed_is_compiled_again(stamp):
    (stamp.parent / "kernel.nbc").unlink()
    assert not compile_kernels.is_done(stamp)


def test_another_processor_compiles_for_itself(stamp, monkeypatch):
    monkeypatch.setattr(compile_kernels, "processor", lambda: "another")
    assert not compile_kernels.is_done(stamp)


def test_everything_that_holds_kernels_is_looked_at():
    names = {path.relative_to(compile_kernels.ROOT).as_posix() for path in compile_kernels.sources()}
    assert {"scheduling/compiled.py", "scheduling/dispatch.py", "forecasting/lengths/text/kernels.py"} <= names
