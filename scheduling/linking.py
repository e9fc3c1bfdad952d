"""Compilation of functions that kernels call: once for all integer types, and for linking only where Python cannot call
them.

Numba optimises and generates machine code for every function together with all that is linked into it. A function inlined
eight calls deep is optimised eight times, and all machine code but the last is never run. Here a function that Python cannot
call (`compiled.INTERNAL`) is left as lowered; the kernel that Python calls is optimised with all of them. The simulator's
loop compiles much faster this way and runs no slower.

Numba compiles a function for each set of argument types, and 0, -1, an element of an int32 array and an int64 are four types
to it. Here a call passes them all as int64.

These classes of Numba are not public: a test fails when kernels are no longer compiled by them.
"""

from typing import Any

from numba.core import compiler, types
from numba.core.codegen import JITCodeLibrary


class _NoEngine:
    """Engine of a library whose functions are never loaded on their own."""

    def set_env(self, name: str, env: object) -> None:
        """Do nothing: no code would read it."""


class LinkedLibrary(JITCodeLibrary):
    """Code that is linked into other libraries."""

    codegen = _NoEngine()

    def finalize(self) -> None:
        """Link in the callees, as Numba does before it optimises."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return None: Python cannot call it."""
        self._ensure_finalized()
        return 0


class LinkedCompiler(compiler.Compiler):
    """Numba's compiler, producing a `LinkedLibrary`."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, library or LinkedLibrary(targetctx.codegen(), "linked"), *rest)


def widen_calls(dispatcher: Any) -> None:
    """Let kernels that call *dispatcher* pass signed integers as int64 and booleans as boolean, constants included."""
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
