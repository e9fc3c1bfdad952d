"""Accuracy of length predictions, and versions of the length model."""

from typing import Any

from controlplane.accounts.models import Role, User
from controlplane.lengths import selectors, services
from controlplane.lengths.models import LengthVersion, VersionState
from controlplane.resources.resource import Column, Operation, Resource, Viewer


def versions(_viewer: Viewer) -> list[LengthVersion]:
    return selectors.versions()


def roll_back(version: LengthVersion, actor: User, reason: str) -> LengthVersion:
    services.rollback(None if version.state == VersionState.ACTIVE else version, actor, reason)
    version.refresh_from_db()
    return version


LENGTH_SERIES = Resource(
    name="lengths",
    noun="series",
    model=None,
    columns=(
        Column("model", type=str),
        Column("tenant", type=str),
        Column(
            "predictor",
            type=str,
            about="`cache`, `prior`, a version such as `trees 3` (0 ships with Pilothouse), or its shadow.",
        ),
        Column("requests", source="measures.requests", type=int),
        *(
            Column(name, source=f"measures.{of}", type=float, about=about)
            for name, of, about in (
                ("mean_output_tokens", "mean_output", ""),
                ("mae_tokens", "mae", ""),
                ("bias_tokens", "bias", "Mean of predicted minus actual; positive: predictions are too long."),
                ("acc_25", "acc_25", "Share off by at most 25 tokens."),
                ("acc_50", "acc_50", ""),
                ("acc_100", "acc_100", ""),
                ("below_median", "coverage_median", "Share at or below the predicted median; ideally 0.5."),
                ("below_upper", "coverage_upper", "Share at or below the predicted 0.9 quantile; ideally 0.9."),
            )
        ),
    ),
)


def shown(name: str, label: str, source: str, draw: str, **more: Any) -> Column:
    """A column of the page alone."""
    return Column(name, "", source, label=label, draw=draw, rest=False, **more)


LENGTH_VERSIONS = Resource(
    name="length-versions",
    noun="version",
    title="Versions",
    model=LengthVersion,
    operations=(
        Operation("promote", services.promote, "A shadow becomes the active version.", needs_reason=False),
        Operation(
            "rollback",
            roll_back,
            "A retired version is active again, or the active one's predecessor; the active one is rejected.",
            needs_reason=False,
        ),
    ),
    rows=versions,
    least=Role.VIEWER,
    columns=(
        Column("number", "Version", draw="console/lengths/version_cell.html"),
        Column("kind", "Kind"),
        Column("state", "State", type=VersionState, draw="mark"),
        Column("trained_at", "Trained (UTC)", draw="age"),
        Column("samples", "Samples", draw="count"),
        shown("mae", "Error held out (tok)", "measures.mae", "quantity"),
        shown("live_requests", "Requests, last day", "measured.requests", "count"),
        shown("live_mae", "Error (tok)", "measured.mae", "quantity"),
        shown("gain", "Against active", "gain", "console/lengths/gain_cell.html", kind="num"),
        Column("note", "Note", draw="console/lengths/note_cell.html", kind="reason"),
        Column("measures", type=dict[str, Any], about="Measured on held-out samples."),
        Column("changed_at"),
    ),
    page=("number", "state", "trained_at", "samples", "mae", "live_requests", "live_mae", "gain", "note"),
    actions="console/lengths/version_actions.html",
)
