"""How functions that kernels call are compiled: once for all integers, and where Python cannot call them only to be linked.

Numba optimises every function with all that is linked into it, and makes machine code of it. One that is inlined eight calls
deep is so optimised eight times, and the machine code of all but the last is never run. Here what Python cannot call
(`compiled.INTERNAL`) is left as it was lowered; the kernel that Python calls is optimised with all of it. The simulator's
loop takes much less time to compile so, and none more to run.

Numba compiles a function for each set of types that it is called with, and to it 0, -1, an element of an int32 array and an
int64 are four types. Here a call passes them all as int64.

These classes of Numba are not public: a test says when they are no longer what a kernel is compiled by.
"""

from typing import Any

from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary


class _NoEngine:
    """Of a library whose functions are never in memory by themselves."""

    def set_env(self, name: str, env: object) -> None:
        """There is no code that would read it."""


class LinkedLibrary(JITCodeLibrary):
    """Code that is linked into that of others."""

    codegen = _NoEngine()

    def finalize(self) -> None:
        """Take in what this code calls, as Numba's own does before it optimises."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """None: Python cannot call it."""
        self._ensure_finalized()
        return 0


class LinkedCompiler(compiler.Compiler):
    """Numba's compiler, for functions of a `LinkedLibrary`."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, library or LinkedLibrary(targetctx.codegen(), "linked"), *rest)


def widen_calls(dispatcher: Any) -> None:
    """Let kernels that call *dispatcher* pass signed integers as int64 and truth values as boolean, constants included."""
    resolve = dispatcher.get_call_template

    def get_call_template(args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
        return resolve(tuple(map(_wide, args)), {name: _wide(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = get_call_template


def _wide(kind: types.Type) -> types.Type:
    if isinstance(kind, types.Integer) and kind.signed:  # type: ignore[attr-defined]
        return types.int64
    if isinstance(kind, types.Boolean):
        return types.boolean
    return kind
