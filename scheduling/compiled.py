"""Kernel compilation: `@compiled` is Numba's `njit` with a disk cache that cannot go stale.

Numba validates a cached kernel by the modification time of its own file only, so a kernel keeps the old code of a callee
whose file changed. Here the kernels of a file are cached in a folder named after a digest of that file and of everything
that it imports from its package, directly or not: a change opens a new folder, and unaffected kernels stay compiled. The
folder is in the user's cache and depends on the digest alone, so a second or moved checkout compiles nothing again.

Numba itself is imported by the first call of a kernel: the import takes most of a second, and most commands and processes
that import kernels call none (checking a scenario, writing rows, showing a page).
"""

import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

from scheduling.compiling import wait_for

Function = TypeVar("Function", bound=Callable[..., Any])

ROOT = Path(__file__).parents[1]
STALE_AFTER_S = 7 * 24 * 3600.0


IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.MULTILINE
)


def source_files(file: Path, root: Path) -> set[Path]:
    """Return *file* and every file under *root* that it imports, directly or not; imports are resolved from *root*."""
    files, unread = {file}, [file]
    while unread:
        for name in _imported_by(_text(unread.pop())):
            path = root.joinpath(*name.split("."))
            for source in (path.with_suffix(".py"), path / "__init__.py"):
                if source not in files and source.is_file():
                    files.add(source)
                    unread.append(source)
    return files


def _text(file: Path) -> bytes:
    """Return the text of *file*, read once unless it changes: most digests of a process need each file."""
    state = file.stat()
    return _read(file, state.st_mtime_ns, state.st_size)


@functools.lru_cache(2048)
def _read(file: Path, _changed_ns: int, _size: int) -> bytes:
    return file.read_bytes()


@functools.lru_cache(2048)
def _imported_by(text: bytes) -> list[str]:
    """Return what a file with this *text* may import: modules, and names in them that may be modules."""
    wanted = []
    for module, names, plain in IMPORT.findall(text):
        wanted += [module.decode()] if module else re.findall(r"[\w.]+", plain.decode())
        wanted += [f"{module.decode()}.{name}" for name in re.findall(r"\w+", names.decode())]
    return wanted


def source_digest(file: Path, root: Path) -> str:
    """Return sixteen hexadecimal digits that change when Numba or a file that the kernels in *file* may use changes."""
    digest = hashlib.sha256(importlib.metadata.version("numba").encode())
    for path in sorted(source_files(file, root)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + _text(path))
    return digest.hexdigest()[:16]


def cache_bases(package: Path) -> list[Path]:
    """Return possible cache folders, best first: NUMBA_CACHE_DIR, the user's cache, the package's `__pycache__`."""
    bases = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilothouse", package / "__pycache__"]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        bases.insert(0, Path(chosen))
    return bases


def cache_folder(file: Path, root: Path) -> Path | None:
    """Create and return the folder for the compiled kernels of *file*; None if nothing is writable (every start compiles).

    Removes folders that have not been used for a week.
    """
    name = f"kernels-{file.stem}-{source_digest(file, root)}"
    for base in cache_bases(root / file.relative_to(root).parts[0]):
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


@functools.cache
def _folder(file: str) -> Path | None:
    path = Path(file)
    if not path.is_relative_to(ROOT):
        return None  # typed at a prompt, or created by a test
    return cache_folder(path, ROOT)


class Locator:
    """Cache locator of Numba: the file's own folder, independent of the checkout's path and modification times.

    Implements NUMBA_CACHE_LOCATOR_CLASSES; Numba's own locators include the path.
    """

    def __init__(self, function: Callable[..., Any], file: str, folder: Path) -> None:
        self._py_file, self._folder = file, folder
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "Locator | None":
        folder = _folder(py_func.__code__.co_filename)
        return cls(py_func, py_file, folder) if folder is not None else None

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """Return a constant: the folder's name already has the digest of all sources."""
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)


class Kernel:
    """*function*, compiled on demand with Numba's *options* and cached on disk if *kept*; Numba is imported on first use.

    Other kernels call it like Numba's own dispatcher, which has the attributes `ASKED_OF_NUMBA`.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], kept: bool) -> None:
        functools.update_wrapper(self, function)
        self.py_func, self._options, self._kept = function, options, kept
        self._call = self._first_call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)

    def _first_call(self, *arguments: Any, **named: Any) -> Any:
        if not self._kept and self.dispatcher is not self.py_func:  # otherwise Numba ends the process
            raise TypeError(f"{self.py_func.__name__} is for compiled callers only; py_func is the plain function")
        if self._kept and self.dispatcher is not self.py_func:
            wait_for(self.py_func, _folder(self.py_func.__code__.co_filename))
        self._call = self.dispatcher
        return self._call(*arguments, **named)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher: compiled code by argument types. Without compilation, the function itself."""
        import numba
        import numba.core.config
        from numba.core.dispatcher import Dispatcher

        import scheduling.struct_type  # noqa: F401 (Numba knows structs of arrays by it)
        from scheduling.linking import LinkedCompiler, widen_calls

        config: Any = numba.core.config
        with IN_NUMBA:
            if "dispatcher" in self.__dict__:
                return self.__dict__["dispatcher"]
            folder = _folder(self.py_func.__code__.co_filename) if self._kept else None
            options = dict(self._options)
            if options.get("no_cpython_wrapper"):
                options["pipeline_class"] = LinkedCompiler
            previous = config.CACHE_LOCATOR_CLASSES
            if folder is not None:  # read once, by the decorator; other users of Numba keep theirs
                config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
            try:
                made = numba.njit(cache=folder is not None, **options)(self.py_func)
            finally:
                config.CACHE_LOCATOR_CLASSES = previous
            if isinstance(made, Dispatcher):  # not without compilation
                widen_calls(made)
            return self.__dict__.setdefault("dispatcher", made)

    @property
    def _numba_type_(self) -> Any:
        """Numba type for compiled callers."""
        return self.dispatcher._numba_type_

    def __getattr__(self, name: str) -> Any:
        if name not in ASKED_OF_NUMBA:
            raise AttributeError(name)  # called for every object by tools that collect tests, copy or inspect
        return getattr(self.dispatcher, name)


ASKED_OF_NUMBA: Final = frozenset({"nopython_signatures", "overloads", "signatures", "stats"})

IN_NUMBA: Final = threading.RLock()
"""Held while Numba's configuration is changed temporarily."""


def compiled(function: Function) -> Function:
    """Compile *function* on its first call with each set of argument types, and cache the result on disk.

    Pass plain `int` and `float` for scalars: another type, such as `np.int32`, compiles once more (a second or so). The
    uncompiled function stays at `.py_func`. A kernel counts no references (inside the simulator's loop that cost more than
    all the work), so it reads and writes arrays but must not create or return any.
    """
    return cast(Function, Kernel(function, OPTIONS, kept=True))


def compiled_without_gil(function: Function) -> Function:
    """Compile *function* like `compiled`, but release the GIL while it runs.

    For kernels that take a millisecond or more: reacquiring the lock may have to wait for another thread.
    """
    return cast(Function, Kernel(function, {**OPTIONS, "nogil": True}, kept=True))


def compiled_inline(function: Function) -> Function:
    """Compile *function* for compiled callers only, inlined into each of them: for the parts of a hot loop.

    It counts no references: it must not create arrays, and its caller's arguments must outlive it, as those of a `compiled`
    function do. (Counting cost fifteen times the work itself.) Python cannot call it, and it is not cached separately.
    """
    return cast(Function, Kernel(function, {**INTERNAL, "forceinline": True}, kept=False))


def compiled_internal(function: Function) -> Function:
    """Compile *function* like `compiled_inline`, but not inlined: off the hot path, so that callers stay small."""
    return cast(Function, Kernel(function, INTERNAL, kept=False))


def direct(kernel: Function) -> Function:
    """Return *kernel*, `compiled`, for a caller that passes the same first argument in every call, by position.

    Numba looks up the code for a call by the type of every argument, which takes ten times as long as most kernels (8 us;
    here 0.3). Here the lookup is repeated only if the first argument is another object, or an argument has another type or
    layout; structs of arrays of one class are assumed alike. Keeps a reference to the latest first argument.
    """
    if not isinstance(kernel, Kernel):
        return kernel
    named: Kernel = kernel
    known: dict[tuple[type, ...], tuple[Any, Callable[..., Any], list[tuple[int, Any]]]] = {}

    def look_up(*arguments: Any) -> Any:
        seen = known.get(tuple(map(type, arguments)))
        if seen is not None and seen[0] is arguments[0]:
            for at, layout in seen[2]:
                if _layout(arguments[at]) != layout:
                    break
            else:
                return seen[1](*arguments)
        answer = named(*arguments)
        numba_kernel = named.dispatcher
        if hasattr(numba_kernel, "overloads"):  # not without compilation
            overload = numba_kernel.overloads.get(tuple(map(numba_kernel.typeof_pyval, arguments)))
            if overload is not None:
                layouts = [(at, _layout(one)) for at, one in enumerate(arguments) if type(one) is np.ndarray]
                known[tuple(map(type, arguments))] = arguments[0], overload.entry_point, layouts
                alike = [
                    arguments[0],
                    *(_layout(one) if type(one) is np.ndarray else type(one) for one in arguments[1:]),
                ]
                scope.update(zip(like, alike, strict=True), _entry=overload.entry_point)
        return answer

    # Spelled out, as a loop over the arguments costs more than most kernels.
    names = list(inspect.signature(named.py_func).parameters)
    like = [f"_{name}" for name in names]
    scope = dict.fromkeys(like, object()) | {
        "_look_up": look_up,
        "_entry": look_up,
        "_array": np.ndarray,
        "_of": _layout,
    }
    checks = (
        f"(type({name}) is {one} or (type({name}) is _array and _of({name}) == {one}))"
        for name, one in zip(names[1:], like[1:], strict=True)
    )
    every, listed = " and ".join([f"{names[0]} is {like[0]}", *checks]), ", ".join(names)
    exec(f"def _call({listed}): return _entry({listed}) if {every} else _look_up({listed})", scope)  # noqa: S102
    return cast(Function, scope["_call"])


def _layout(array: Any) -> tuple[Any, int, int]:
    return array.dtype, array.ndim, array.flags.num


def uncompiled(kernel: Function) -> Function:
    """Return the plain Python function of *kernel*: for few calls on plain numbers, which must not wait for Numba."""
    return cast(Function, kernel.py_func) if isinstance(kernel, Kernel) else kernel


OPTIONS: Final = {"_nrt": False, "error_model": "numpy", "forceinline": False}
"""Without these, Numba inlines a function at every call if the first caller it is compiled for is an inline one."""
INTERNAL: Final = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def record(fields: list[tuple[str, type[np.generic]]]) -> np.dtype[np.void]:
    """Return a record type of *fields* that compiled and uncompiled code both read by attribute."""
    return np.dtype((np.record, np.dtype(fields, align=True)))


@compiled_inline
def index(number: int) -> int:
    """Return *number*, from 0 up to 2**32, so that the compiler omits Python's handling of negative indices.

    That was one in eight instructions of the simulator's loop.
    """
    return np.int64(np.uint32(number))  # type: ignore[return-value]  # a plain int to compiled code
