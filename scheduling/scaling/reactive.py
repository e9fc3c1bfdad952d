"""SageServe's reactive heuristic (section 4): out above one threshold of use, in below
another; optionally with patience.

The paper decides at every arrival and without patience, as does the simulator's compiled trigger (`Reactive` with its
defaults). Strategies and the gateway's floor, which decide at ticks, have patience.
"""

from dataclasses import dataclass, replace
from typing import Final

from scheduling.compiled import compiled
from scheduling.scaling.endpoint import EndpointView, Wish, percent, use_words

PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Reactive:
    """Parameters of the rule.

    Use is the endpoint's pressure (`scheduling.routing.regions`): memory or sequences, whichever is fuller, and the queue.
    """

    out_above: float = 0.7
    in_below: float = 0.3
    cooldown_s: float = 15.0
    """Least time between two changes at one endpoint."""
    min_instances: int = 2
    max_instances: int = 20
    patience_s: float = 0.0
    """Time of low use without a change before a removal. 0 is the paper's rule, which ignores what is starting."""

    def __post_init__(self) -> None:
        if not 0 <= self.in_below < self.out_above:
            raise ValueError(f"in_below ({self.in_below}) must be at least 0 and below out_above ({self.out_above})")
        for what in ("cooldown_s", "patience_s"):
            if not getattr(self, what) >= 0:
                raise ValueError(f"{what} must be at least 0, not {getattr(self, what)}")
        if not 0 <= self.min_instances <= self.max_instances:
            raise ValueError(
                f"min_instances ({self.min_instances}) must be from 0 to max_instances ({self.max_instances})"
            )

    def within(self, view: EndpointView) -> "Reactive":
        """Return the rule with the bounds of *view*."""
        return replace(self, min_instances=view.min_instances, max_instances=view.max_instances)


@compiled
def reactive_move(
    use: float,
    ready: int,
    coming: int,
    draining: int,
    since_change_s: float,
    easy_s: float,
    out_above: float,
    in_below: float,
    cooldown_s: float,
    min_instances: int,
    max_instances: int,
    patience_s: float,
) -> int:
    """Return 1 to add an instance, -1 to remove one, else 0. The last parameters are those of `Reactive`.

    *easy_s*: for how long *use* has been below the lower threshold with nothing waiting. Without patience neither that
    nor *draining* counts, and *coming* may be counted as *ready*.
    """
    if since_change_s < cooldown_s:
        return 0
    instances = ready + coming
    if instances < min_instances:
        return 1
    if use > out_above and instances < max_instances:
        if patience_s > 0 and coming > 0 and (ready == 0 or use * ready / instances <= out_above):
            return 0  # starting instances suffice
        return 1
    if use < in_below and instances > min_instances:
        if patience_s > 0:
            if coming > 0 or draining > 0 or min(easy_s, since_change_s) < patience_s:
                return 0
            if use * ready / max(ready - 1, 1) > out_above:
                return 0  # the others have no room for its requests
        return -1
    return 0


def reactive_wish(view: EndpointView, rule: Reactive, easy_s: float) -> Wish:
    """Return the move of *rule* for *view*, within the bounds of *rule*, and why. *easy_s* as in `reactive_move`."""
    delta = reactive_move(
        float(view.use),
        view.ready,
        view.coming,
        view.draining,
        float(view.since_change_s),
        float(easy_s),
        rule.out_above,
        rule.in_below,
        rule.cooldown_s,
        rule.min_instances,
        rule.max_instances,
        rule.patience_s,
    )
    if delta > 0 and view.use > rule.out_above:
        soon = f", {soon_words(view)}" if view.coming and view.ready and rule.patience_s else ""
        return 1, f"{use_words(view)}{soon}, above {percent(rule.out_above)}"
    if delta > 0:
        return 1, f"Below its minimum of {rule.min_instances}"
    if delta < 0:
        lasted = f" for {min(easy_s, view.since_change_s):.0f} s" if rule.patience_s else ""
        return -1, f"{use_words(view)}, below {percent(rule.in_below)}{lasted}"
    return 0, ""


def is_easy(view: EndpointView, rule: Reactive) -> bool:
    """Whether one could be removed by *rule* if this lasts."""
    return view.use < rule.in_below and not view.waiting


def soon_words(view: EndpointView) -> str:
    """Return a text such as `70% with the 1 on the way`."""
    return f"{percent(view.use * view.ready / view.instances)} with the {view.coming} on the way"
