"""One way to compile a kernel: `@compiled` is Numba's `njit` with a disk cache that cannot go stale.

Numba decides whether a cached kernel is still good by the modification time of the file that holds it. A kernel that
calls another one in a second file keeps the old code of the callee when only the second file changes. So the cache
lives in a folder named after a digest of all source files of this package that hold kernels: a change opens a new one.
Constants that kernels use must therefore live in a module that has kernels, or be passed in.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.core.config

Function = TypeVar("Function", bound=Callable[..., Any])

STALE_AFTER_S = 7 * 24 * 3600.0


def source_digest(package: Path) -> str:
    """Sixteen hexadecimal digits that change when a file with kernels under *package* or Numba itself changes."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"@compiled" in source:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + source)
    return digest.hexdigest()[:16]


def cache_folder(package: Path) -> Path | None:
    """The folder for compiled kernels, created; None when no place is writable (then every start compiles).

    Tried in turn: NUMBA_CACHE_DIR, the package's own `__pycache__`, the user's cache folder. Folders of other digests
    that nobody has used for a week are removed on the way.
    """
    bases = [package / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilothouse"]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        bases.insert(0, Path(chosen))
    name = f"kernels-{source_digest(package)}"
    for base in bases:
        folder = base / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                os.utime(folder)
            for other in base.glob("kernels-*"):
                if other.name != name and time.time() - other.stat().st_mtime > STALE_AFTER_S:
                    shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue
        return folder
    return None


config: Any = numba.core.config
_FOLDER = cache_folder(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """Compile *function* on its first call with each set of argument types, and keep the result on disk.

    Pass plain `int` and `float` for scalars: another type, such as `np.int32`, compiles once more (a second or so).
    The uncompiled function stays at `.py_func`. A kernel counts no references (inside the simulator's loop that cost more
    than all the work), so it reads and writes arrays but must not make or return any.
    """
    previous = config.CACHE_DIR
    if _FOLDER is not None:
        config.CACHE_DIR = str(_FOLDER)  # read once, by the decorator; other users of Numba keep theirs
    try:
        return cast(Function, cast(Any, numba.njit)(cache=_FOLDER is not None, _nrt=False)(function))
    finally:
        config.CACHE_DIR = previous


def compiled_part(function: Function) -> Function:
    """As `compiled`, for a part of a hot loop: only compiled code calls it, and it becomes a piece of its caller.

    It counts no references: it must not make arrays, and its caller's arguments must outlive it, as those of a `compiled`
    function do. (Counting cost fifteen times the work itself.) It has no way in from Python and no cache of its own.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "forceinline": True}
    return cast(Function, cast(Any, numba.njit)(**options)(function))


def compiled_aside(function: Function) -> Function:
    """As `compiled_part`, off the hot path: it stays a function of its own, so that callers do not swell with it."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return cast(Function, cast(Any, numba.njit)(**options)(function))
