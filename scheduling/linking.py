"""How functions that only other kernels call are compiled: made ready to be linked, and no more.

Numba optimises every function with all that is linked into it, and makes machine code of it. One that is inlined eight calls
deep is so optimised eight times, and the machine code of all but the last is never run. Here what Python cannot call
(`compiled.INTERNAL`) is left as it was lowered; the kernel that Python calls is optimised with all of it. The simulator's
loop takes much less time to compile so, and none more to run.

These classes of Numba are not public: a test says when they are no longer what a kernel is compiled by.
"""

from typing import Any

from numba.core import compiler
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
