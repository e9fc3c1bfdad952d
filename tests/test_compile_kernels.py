"""What was compiled is not loaded again, until a source, the processor or a kernel on disk has changed."""

import os

import pytest

from tests import compile_kernels


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source.py"
    source.write_text("")
    monkeypatch.setattr(compile_kernels, "sources", lambda: [source])
    return source


@pytest.fixture
def kernel(source):
    kernel = source.parent / "cache" / "kernels-source-0" / "kernel.nbc"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("")
    compile_kernels.note_done(compile_kernels.stamp(), compile_kernels.kept(0.0))
    return kernel


def done():
    return compile_kernels.is_done(compile_kernels.stamp())


def test_it_is_done_once(source, kernel):
    assert done()
    (kernel.parent / "another.nbc").write_text("")  # what a test compiled for itself
    assert done()
    os.utime(source, (1.0, 1.0))  # another checkout of the same sources
    assert done()
    compile_kernels.stamp().unlink()
    assert not done()


def test_a_source_that_changed_is_compiled_again(source, kernel):
    source.write_text("# changed")
    assert not done()


def test_a_kernel_that_was_removed_is_compiled_again(kernel):
    kernel.unlink()
    assert not done()


def test_another_processor_compiles_for_itself(kernel, monkeypatch):
    monkeypatch.setattr(compile_kernels, "processor", lambda: "another")
    assert not done()


def test_kernels_of_folders_that_nobody_asked_for_do_not_count(source, kernel):
    os.utime(kernel.parent, (1.0, 1.0))
    assert str(kernel) not in compile_kernels.kept(2.0)
    assert str(kernel) in compile_kernels.kept(0.0)


def test_everything_that_holds_kernels_is_looked_at():
    names = {path.relative_to(compile_kernels.ROOT).as_posix() for path in compile_kernels.sources()}
    assert {"scheduling/compiled.py", "scheduling/dispatch.py", "forecasting/lengths/text/kernels.py"} <= names
