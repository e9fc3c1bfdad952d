"""Versions of the length model: measured on held-out samples and, on the page, by live requests."""

from typing import Any

from controlplane.accounts.models import Role
from controlplane.lengths import selectors
from controlplane.lengths.models import LengthVersion, VersionState
from controlplane.resources.resource import Column, Resource, Viewer

HELD_OUT = "On samples held out"
LIVE = "Live, in this range"


def versions(_viewer: Viewer) -> list[LengthVersion]:
    return selectors.versions()


def shown(name: str, heading: str, source: str, draw: str = "", **more: Any) -> Column:
    """A column of the page and the file alone."""
    return Column(name, heading, source, draw=draw, rest=False, **more)


LENGTH_VERSIONS = Resource(
    name="length-versions",
    noun="version",
    title="Versions",
    model=LengthVersion,
    rows=versions,
    least=Role.VIEWER,
    columns=(
        Column("number", "Version", draw="console/lengths/version_cell.html"),
        Column("kind", "Kind"),
        Column("state", "State", type=VersionState, draw="console/lengths/version_state.html"),
        Column("trained_at", "Trained (UTC)", draw="age"),
        Column("samples", "Samples", draw="count"),
        shown("mae", "Held out: MAE (tokens)", "measures.mae", "quantity", label="MAE", group=HELD_OUT),
        shown("acc_25", "Held out: within 25 (ratio)", "measures.acc_25", "percent", label="Acc-25", group=HELD_OUT),
        shown("acc_50", "Held out: within 50 (ratio)", "measures.acc_50", "percent", label="Acc-50", group=HELD_OUT),
        shown(
            "acc_100", "Held out: within 100 (ratio)", "measures.acc_100", "percent", label="Acc-100", group=HELD_OUT
        ),
        shown(
            "rank_correlation",
            "Held out: rank correlation (-1 to 1)",
            "measures.rank_correlation",
            "correlation",
            label="Rank",
            group=HELD_OUT,
        ),
        shown("live_requests", "Live: requests", "measured.requests", "count", label="Requests", group=LIVE),
        shown("live_mae", "Live: MAE (tokens)", "measured.mae", "quantity", label="MAE", group=LIVE),
        shown("live_acc_100", "Live: within 100 (ratio)", "measured.acc_100"),
        shown("gain", "", "gain", "console/lengths/gain_cell.html", label="Against active", group=LIVE, kind="num"),
        Column("note", "Note", draw="console/lengths/note_cell.html", kind="reason"),
        Column("measures", type=dict[str, Any], about="Measured on held-out samples."),
        Column("changed_at"),
    ),
    page=(
        *("number", "state", "trained_at", "samples", "mae", "acc_25", "acc_50", "acc_100", "rank_correlation"),
        *("live_requests", "live_mae", "gain", "note"),
    ),
    actions="console/lengths/version_actions.html",
)
