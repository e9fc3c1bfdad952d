"""Starts by kind: the live fleet, a window of the ledger, an uploaded trace, or a scenario's own clients."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from django.db.models import Count, QuerySet
from django.utils import timezone
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.models import LedgerRow
from controlplane.rows import within
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.fork import fork_fleet
from controlplane.simulation.whatif.models import TraceFile
from controlplane.simulation.whatif.selectors import present_scenario
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts.past import past_demand


class Begin(BaseModel):
    """Requested start of a what-if."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["fleet", "ledger", "trace", "synthetic"] = "fleet"
    since: datetime | None = None
    """Start of the ledger's window. A time without a zone is UTC."""
    until: datetime | None = None
    trace: int | None = None
    """Number of an uploaded trace, for the present fleet."""
    trace_keys: dict[str, Any] = {}
    """Keys of a scenario's `[trace]`: speed, limit, model, models, region, slo_class, tenant, if the trace lacks them."""
    scenario: dict[str, Any] = {}
    """Keys of a scenario file with clients: another fleet and other demand."""

    @property
    def window_s(self) -> float | None:
        """The length of the ledger's window; None if it is none, which its start reports."""
        until = self.until or timezone.now()
        return (
            (until - self.since).total_seconds()
            if self.kind == "ledger" and self.since and self.since < until
            else None
        )

    @field_validator("since", "until")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return within(value if value.tzinfo else value.replace(tzinfo=UTC)) if value else None


def start_of(asked: Begin | Mapping[str, Any], horizon_s: float) -> Start:
    """Return the start *asked* for. Raise ActionError where it is impossible."""
    if not isinstance(asked, Begin):
        try:
            asked = Begin.model_validate(asked)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ActionError(f"{first['loc'][0]}: {first['msg']}") from error
    if asked.kind == "synthetic":
        return Start(kind="synthetic", at=timezone.now(), scenario=asked.scenario)
    match asked.kind:
        case "fleet":
            return fork_fleet(horizon_s)
        case "ledger":
            since, until = asked.since, asked.until or timezone.now()
            if since is None or since >= until:
                raise ActionError("Give since, before until.")
            rows = ledger_rows(since, until)
            if not rows.exists():
                raise ActionError(
                    f"The ledger has no request from {since:%d %B %H:%M} until {until:%d %B %H:%M} (UTC)."
                )
            arrivals = {"kind": "ledger", "since": since.isoformat(), "until": until.isoformat()}
            scenario = _fleet()
            return Start(
                kind="ledger",
                at=since,
                scenario=scenario,
                arrivals=arrivals,
                past=past_demand(since),
                remarks=_left_out(rows, scenario),
            )
    if not TraceFile.objects.filter(pk=asked.trace or 0).exists():
        raise ActionError("There is no such trace. Upload one.")
    return Start(
        kind="trace",
        at=timezone.now(),
        scenario=_fleet(),
        arrivals={**asked.trace_keys, "kind": "file", "trace": asked.trace},
    )


def _fleet() -> dict[str, Any]:
    """Return the present fleet without running and waiting requests. Raise ActionError if there is none."""
    scenario = present_scenario()
    if not scenario["fleet"]:
        raise ActionError("No active deployment has a performance profile, which gives instances' times.")
    return scenario | {"demand": {"too_long": "clip"}}


def _left_out(rows: QuerySet[LedgerRow], scenario: dict[str, Any]) -> list[str]:
    """Describe the requests of *rows* whose model *scenario* lacks; `staging.demand.of_the_fleet` leaves them out."""
    of_models = dict(rows.order_by().values_list("model").annotate(Count("pk")))
    missing = {name: count for name, count in sorted(of_models.items()) if name not in scenario["models"]}
    if not missing:
        return []
    names = ", ".join(f"{name} ({count:,} requests)" for name, count in missing.items())
    return [f"Left out for lack of a performance profile, which gives instances' times: {names}."]
