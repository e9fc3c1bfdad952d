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


def measure(name: str, heading: str, of: str, draw: str, label: str, about: str = "") -> Column:
    """A column of `Measures`."""
    return Column(name, heading, f"measures.{of}", draw=draw, label=label, about=about, sorts=True, type=float)


MEASURED = (
    Column("requests", "Requests", "measures.requests", draw="count", sorts=True, type=int),
    measure("mean_output_tokens", "Mean length (tokens)", "mean_output", "quantity", "Mean length"),
    measure("mae_tokens", "MAE (tokens)", "mae", "quantity", "MAE"),
    measure(
        "bias_tokens",
        "Bias (tokens)",
        "bias",
        "signed",
        "Bias",
        "Predicted minus actual; positive: predictions are too long.",
    ),
    measure("acc_25", "Within 25 tokens (ratio)", "acc_25", "share", "Acc-25", "Share off by at most 25 tokens."),
    measure("acc_50", "Within 50 tokens (ratio)", "acc_50", "share", "Acc-50"),
    measure("acc_100", "Within 100 tokens (ratio)", "acc_100", "share", "Acc-100"),
    measure(
        "below_median",
        "At most the median (ratio)",
        "coverage_median",
        "percent",
        "In median",
        "Share at or below the predicted median; ideally 0.5.",
    ),
    measure(
        "below_upper",
        "At most the 0.9 quantile (ratio)",
        "coverage_upper",
        "percent",
        "In 0.9 q.",
        "Share at or below the predicted 0.9 quantile; ideally 0.9.",
    ),
)
LENGTH_SERIES = Resource(
    name="lengths",
    noun="series",
    title="By model and tenant",
    model=None,
    columns=(
        Column("model", "Model", type=str, draw="console/lengths/series_cell.html", sorts=True),
        Column("tenant", "Tenant", type=str, sorts=True),
        Column(
            "predictor",
            type=str,
            about="`cache`, `prior`, a version such as `trees 3` (0 ships with Pilothouse), or its shadow.",
        ),
        *MEASURED,
    ),
    page=("model", "tenant", *(column.name for column in MEASURED)),
)


def shown(name: str, heading: str, source: str, draw: str = "", **more: Any) -> Column:
    """A column of the page and the file alone."""
    return Column(name, heading, source, draw=draw, rest=False, **more)


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
        Column("state", "State", type=VersionState, draw="console/lengths/version_state.html"),
        Column("trained_at", "Trained (UTC)", draw="age"),
        Column("samples", "Samples", draw="count"),
        shown("mae", "Held out: MAE (tokens)", "measures.mae", "quantity", label="MAE held out"),
        *(
            shown(f"acc_{off}", f"Held out: within {off} (ratio)", f"measures.acc_{off}", "percent", label=f"Acc-{off}")
            for off in (25, 50, 100)
        ),
        shown("live_requests", "Live: requests", "measured.requests", "count", label="Requests"),
        shown("live_mae", "Live: MAE (tokens)", "measured.mae", "quantity", label="MAE live"),
        shown("live_acc_100", "Live: within 100 (ratio)", "measured.acc_100"),
        shown("gain", "", "gain", "console/lengths/gain_cell.html", label="Against active", kind="num"),
        Column("note", "Note", draw="console/lengths/note_cell.html", kind="reason"),
        Column("measures", type=dict[str, Any], about="Measured on held-out samples."),
        Column("changed_at"),
    ),
    page=(
        *("number", "state", "trained_at", "samples", "mae", "acc_25", "acc_50", "acc_100"),
        *("live_requests", "live_mae", "gain", "note"),
    ),
    actions="console/lengths/version_actions.html",
)
