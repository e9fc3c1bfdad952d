"""The rules that settings make, with the marks that are in force: for the gateway, the workers and simulations of both."""

from controlplane.tunable import Tunable
from scheduling.scaling import Floor, Reactive


def alone(tuned: Tunable) -> Reactive:
    """The floor's rule where no strategy is alive; the bounds are each endpoint's own."""
    return Reactive(
        out_above=tuned.FLOOR_OUT_ABOVE,
        in_below=tuned.FLOOR_IN_BELOW,
        cooldown_s=tuned.SCALE_COOLDOWN_S,
        min_instances=0,
        patience_s=tuned.FLOOR_EASE_S,
    )


def beneath(tuned: Tunable) -> Floor:
    """The floor's rule beneath a strategy that is."""
    return Floor(above=tuned.FLOOR_BENEATH_ABOVE, cooldown_s=tuned.SCALE_COOLDOWN_S)
