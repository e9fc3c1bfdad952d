import os
import time

import pytest

from scheduling import compiled


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "kernels.py").write_text("@compiled\ndef f(): ...\n")
    (folder / "words.py").write_text("GREETING = 'hello'\n")
    return folder


def test_the_digest_follows_the_kernels_and_only_them(package):
    before = compiled.source_digest(package)
    (package / "words.py").write_text("GREETING = 'good day'\n")
    assert compiled.source_digest(package) == before
    (package / "kernels.py").write_text("@compiled\ndef f(): return 1\n")
    assert compiled.source_digest(package) != before


def test_the_cache_lies_beside_the_sources(package, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    folder = compiled.cache_folder(package)
    assert folder == package / "__pycache__" / f"kernels-{compiled.source_digest(package)}"
    assert folder.is_dir()


def test_numbas_own_setting_comes_first(package, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert compiled.cache_folder(package).parent == tmp_path / "chosen"


def test_sources_that_cannot_be_written_beside_use_the_users_cache_and_else_none(package, tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (package / "__pycache__").write_text("a file where the folder should be")
    assert compiled.cache_folder(package).parent == tmp_path / "home" / "pilothouse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(package / "__pycache__"))
    assert compiled.cache_folder(package) is None


def test_folders_that_nobody_used_for_a_week_are_removed(package, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    old, recent = (package / "__pycache__" / name for name in ("kernels-old", "kernels-recent"))
    for folder in (old, recent):
        folder.mkdir(parents=True)
    week_ago = time.time() - compiled.STALE_AFTER_S - 60
    os.utime(old, (week_ago, week_ago))
    assert compiled.cache_folder(package).is_dir()
    assert not old.exists()
    assert recent.exists()


def test_numbas_setting_is_left_as_it_was():
    setting = compiled.config.CACHE_DIR
    kernel = compiled.compiled(lambda number: number + 1)
    assert setting == compiled.config.CACHE_DIR
    assert kernel(1) == 2
