"""The strategies by which a model may be scaled, as the policy library names them, made from a policy's row."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduling.scaling import Strategy

try:  # the package of strategies is being written
    from scheduling.scaling import STRATEGIES
except ImportError:
    STRATEGIES = dict.fromkeys(
        ("siloed", "reactive", "lt_i", "lt_u", "lt_ua", "preserve", "proactive", "hybrid", "ours"), dict
    )


def names() -> list[str]:
    """All strategies, in the order in which they are listed."""
    return list(STRATEGIES)


def make(name: str, parameters: dict[str, Any]) -> "Strategy":
    """The strategy *name* with *parameters*. Raises ValueError, in words to show, if there is none or they do not fit."""
    if name not in STRATEGIES:
        raise ValueError(f"There is no strategy {name!r}; there are {', '.join(STRATEGIES)}.")
    try:
        return STRATEGIES[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The parameters do not fit {name}: {error}") from error
