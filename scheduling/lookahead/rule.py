"""Horizon of look-ahead decisions, and the KV cache use that counts as overload in it (PreServe 4.3.2 and 4.3.3)."""

from typing import Annotated, Final

from scheduling.knob import Knob, Policy

ITERATIONS: Final = 0
MEMORY_ABOVE: Final = 1
BETA: Final = 2
OVERLOAD_ABOVE: Final = 3
OVERLOAD_SHARE: Final = 4
"""Columns of a row of `FleetArrays.look_ahead`: the fields of `LookAheadRule`, in order."""


class LookAheadRule(Policy, frozen=True):
    """Parameters of routers that look ahead, and of the look-ahead figures of strategies."""

    iterations: Annotated[
        int,
        Knob(
            ge=1,
            le=2048,  # half of a map's horizon, for which it is exact (`maps.allocate`)
            setting="LOOKAHEAD_ITERATIONS",
            help="Iterations of an instance that the routers `preserve` and `least_delay` and PreServe's scaler look "
            "ahead.",
        ),
    ] = 100
    memory_above: Annotated[
        float,
        Knob(
            gt=0,
            setting="LOOKAHEAD_MEMORY_ABOVE",
            help="Use of the KV cache in one of them above which these routers count a risk (PreServe's T_mem); 1 is "
            "full.",
        ),
    ] = 0.8
    beta: Annotated[
        float,
        Knob(
            ge=0,
            setting="LOOKAHEAD_BETA",
            help="Weight of a token beyond it for the router `preserve` (PreServe's beta).",
        ),
    ] = 1.0
    overload_above: Annotated[
        float,
        Knob(
            gt=0,
            setting="LOOKAHEAD_OVERLOAD_ABOVE",
            help="Use of the KV cache above which PreServe's scaler sees an overload and adds an instance; 1 is full.",
        ),
    ] = 0.95
    overload_share: Annotated[
        float,
        Knob(
            ge=0,
            le=1,
            setting="LOOKAHEAD_OVERLOAD_SHARE",
            help="Share of the iterations in which use must be above it.",
        ),
    ] = 0.1
