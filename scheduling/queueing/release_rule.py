"""When work that is not interactive leaves the queue manager (SageServe section 6.3): the knobs of `queueing.held_work`."""

from typing import Annotated, Final

from scheduling.knob import Knob, Policy

SLACK: Final = "slack"
USE: Final = "use"
AT_ONCE: Final = "at_once"
RELEASES: Final = {
    SLACK: "As much as has room, and in time for its deadline",
    USE: "One or two at a time by use alone (SageServe)",
    AT_ONCE: "At once, behind interactive work",
}


class ReleaseRule(Policy, frozen=True):
    """When the requests of non-interactive and opportunistic classes are released to an endpoint."""

    by: Annotated[
        str,
        Knob(
            choices=RELEASES,
            setting="NIW_RELEASE",
            help="How the queue manager releases work of non-interactive classes: `slack` as much as has room below "
            "NIW_ONE_BELOW, the least slack first, and in time for its deadline; `use` one or two at a time in order of "
            "arrival, as SageServe; `at_once` holds nothing.",
        ),
    ] = SLACK
    one_below: Annotated[
        float,
        Knob(
            gt=0,
            le=1,
            setting="NIW_ONE_BELOW",
            help="Use of an endpoint by interactive requests below which it is given non-interactive work; 1 is full.",
        ),
    ] = 0.6
    two_below: Annotated[
        float,
        Knob(
            ge=0,
            le=1,
            setting="NIW_TWO_BELOW",
            help="Use below which the release rule `use` gives two requests at a time.",
        ),
    ] = 0.5
    slowdown: Annotated[
        float,
        Knob(
            ge=1,
            setting="NIW_SLOWDOWN",
            help="How many times as long as without released work the first token of an interactive request may be "
            "expected to take, by the endpoint's profile, for the release rule `slack` to release more. Deadlines go "
            "before it.",
        ),
    ] = 1.15
