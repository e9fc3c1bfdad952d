"""How much of a family of tests runs when: few examples of property tests and a few cases in `make test`, more in the gate,
many at night.

`make test` draws the same ones in every run, so that a change fails for what it changed. The gate (`--hypothesis-profile
gate`) and the night draw others each time, by a seed that the Makefile prints. What fails is kept in `.hypothesis` and tried
first the next time; the line `@reproduce_failure` that is printed with it repeats it anywhere. It becomes an `@example`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

FEW, USUAL, MANY = 10, 25, 150

# Hypothesis also draws numbers that stand in the modules which are loaded, so that the examples of a test would depend on
# which others run in its process. Not a public setting: where the function is not there, nothing is patched.
_of_loaded_modules: Any = getattr(providers, "_get_local_constants", None)


def _local_constants() -> Any:
    return providers.Constants() if settings().derandomize else _of_loaded_modules()


if _of_loaded_modules is not None:
    providers._get_local_constants = _local_constants

# Examples are judged by what they find, not by how long they take on a busy machine.
settings.register_profile("few", max_examples=FEW, deadline=None, derandomize=True)
settings.register_profile("gate", max_examples=USUAL, deadline=None, print_blob=True)
settings.register_profile("night", max_examples=MANY, deadline=None, print_blob=True)


def costly(few: int, many: int | None = None) -> settings:
    """For a test whose examples take long, or that wants more: *few* where others draw USUAL, and otherwise in proportion;
    *many* where that is given and others draw more."""
    if many is not None and settings().max_examples > USUAL:
        return settings(max_examples=many)
    return settings(max_examples=max(1, few * settings().max_examples // USUAL))


def at_night_but(fast: Sequence[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of `parametrize`: those in *fast* run always, the others with `make nightly`. A tuple has several arguments."""
    return [
        case if case in fast else pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.nightly)
        for case in cases
    ]
