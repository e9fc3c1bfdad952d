import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from scheduling import compiled

KERNELS = """from package.parts import (
    half,
)
from package import words as _words
import os, package.deep.bottom
@compiled
def f(): ...
"""


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "package"
    (folder / "deep").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "kernels.py": KERNELS,
        "parts.py": "def late():\n    from package.deep import middle\n",
        "words.py": "",
        "other.py": "import package.kernels\n",
        "deep/__init__.py": "",
        "deep/middle.py": "",
        "deep/bottom.py": "from package.kernels import f\n",
    }.items():
        (folder / name).write_text(text)
    return tmp_path


@pytest.fixture
def kernels(root):
    return root / "package/kernels.py"


def test_a_file_is_followed_into_all_that_it_imports(root, kernels):
    followed = {str(path.relative_to(root / "package")) for path in compiled.source_files(kernels, root)}
    assert followed == {
        "__init__.py", "kernels.py", "parts.py", "words.py", "deep/__init__.py", "deep/middle.py", "deep/bottom.py",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["kernels.py", "parts.py", "words.py", "deep/middle.py", "deep/bottom.py"])
def test_the_digest_follows_what_the_kernels_may_use(root, kernels, name):
    before = compiled.source_digest(kernels, root)
    with (root / "package" / name).open("a") as file:
        file.write("# changed\n")
    assert compiled.source_digest(kernels, root) != before


def test_the_digest_does_not_follow_anything_else(root, kernels):
    before = compiled.source_digest(kernels, root)
    (root / "package/other.py").write_text("import package.kernels  # changed\n")
    (root / "elsewhere.py").write_text("")
    assert compiled.source_digest(kernels, root) == before


@pytest.fixture
def users(root, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "home"))
    return root / "home" / "pilothouse"


def test_the_cache_lies_in_the_users(root, kernels, users):
    folder = compiled.cache_folder(kernels, root)
    assert folder == users / f"kernels-kernels-{compiled.source_digest(kernels, root)}"
    assert folder.is_dir()


def test_numbas_own_setting_comes_first(root, kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert compiled.cache_folder(kernels, root).parent == tmp_path / "chosen"


def test_the_cache_lies_next_to_the_sources_where_the_users_cannot_be_written(root, kernels, users):
    users.parent.write_text("a file where the folder should be")
    assert compiled.cache_folder(kernels, root).parent == root / "package/__pycache__"
    shutil.rmtree(root / "package/__pycache__")
    (root / "package/__pycache__").write_text("a file where the folder should be")
    assert compiled.cache_folder(kernels, root) is None


CHECKOUT = """
from package import kernels
assert kernels.f(1) == 2
print(sum(kernels.f.stats.cache_misses.values()))
"""


@pytest.mark.nightly
def test_a_second_checkout_compiles_nothing_again(tmp_path, users):
    """With another path and other file times nothing is compiled; a change of a dependency is."""

    def compilations(checkout: Path) -> int:
        command = [sys.executable, "-c", CHECKOUT]
        environment = {**os.environ, "XDG_CACHE_HOME": str(users.parent)}
        answer = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
        return int(answer.stdout)

    for name in ("first", "second"):
        folder = tmp_path / name
        (folder / "package").mkdir(parents=True)
        (folder / "scheduling").mkdir()
        (folder / "scheduling/__init__.py").write_text("")
        (folder / "package/__init__.py").write_text("")
        for source in ("compiled", "linking", "struct_of_arrays", "struct_type"):
            shutil.copy(Path(compiled.__file__).with_name(f"{source}.py"), folder / "scheduling")
        (folder / "package/part.py").write_text("ONE = 1\n")
        (folder / "package/kernels.py").write_text(
            "from package.part import ONE\nfrom scheduling.compiled import compiled\n\n"
            "@compiled\ndef f(number):\n    return number + ONE\n"
        )
    assert compilations(tmp_path / "first") > 0
    assert compilations(tmp_path / "second") == 0
    (tmp_path / "second/package/part.py").write_text("ONE = 2 - 1\n")
    assert compilations(tmp_path / "second") > 0


def test_folders_unused_for_a_week_are_removed(root, kernels, users):
    old, recent = (users / name for name in ("kernels-old", "kernels-recent"))
    for folder in (old, recent):
        folder.mkdir(parents=True)
    week_ago = time.time() - compiled.STALE_AFTER_S - 60
    os.utime(old, (week_ago, week_ago))
    assert compiled.cache_folder(kernels, root).is_dir()
    assert not old.exists()
    assert recent.exists()


def test_the_projects_kernels_stay_when_what_they_do_not_use_changes():
    live = {path.name for path in compiled.source_files(compiled.ROOT / "scheduling/dispatch.py", compiled.ROOT)}
    assert {"dispatch.py", "routers.py", "waiting_set.py", "arrays.py", "profile.py"} <= live
    assert "loop.py" not in live


def test_numbas_setting_is_left_as_it_was():
    setting = config.CACHE_LOCATOR_CLASSES
    kernel = compiled.compiled(lambda number: number + 1)
    assert kernel(1) == 2
    assert setting == config.CACHE_LOCATOR_CLASSES


def test_what_only_kernels_call_is_linked_and_not_made_machine_code_of_by_itself():
    """In another version of Numba it may be: then check `scheduling.linking`."""
    from scheduling.linking import LinkedLibrary

    @compiled.compiled_inline
    def twice(x):
        return 2 * x

    @compiled.compiled_internal
    def and_one(x):
        return twice(x) + 1

    @compiled.compiled
    def outer(values):
        for at in range(values.size):
            values[at] = and_one(values[at])

    values = np.arange(3)
    outer(values)
    assert values.tolist() == [1, 3, 5]
    for kernel, linked in ((twice, True), (and_one, True), (outer, False)):
        libraries = [result.library for result in kernel.overloads.values()]
        assert libraries
        assert all(isinstance(library, LinkedLibrary) == linked for library in libraries)


def test_only_what_is_to_be_inlined_is_even_if_an_inlined_function_calls_it_first():
    """Numba passes the option on to what it compiles for a caller, and a large function would be copied into each."""

    @compiled.compiled_internal
    def one_more(x):
        return x + 1

    @compiled.compiled_inline
    def twice(x):
        return 2 * one_more(x)

    @compiled.compiled
    def outer(x):
        return twice(x)

    assert outer(2) == 6
    for kernel, inlined in ((one_more, False), (twice, True)):
        assert [result.fndesc.inline for result in kernel.overloads.values()] == [inlined]
