"""Versions of demand graphs: kept each day and on import, compared, restored and frozen.

A version is the graph as it was, in JSON. One that is restored is imported: its records replace all others, and runs that
end later are learned on top of them. While an application is frozen its runs are recorded, and learned once it learns again.
"""

import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import transaction
from django.db.models import Max

from controlplane.accounts.models import Tenant, User
from controlplane.applications.completion import DAY
from controlplane.applications.models import Application, GraphVersion, learned
from controlplane.applications.selectors import UnitSummary, graph_of, quality, unit_summaries
from controlplane.applications.services import application_to_fill, import_graph
from controlplane.applications.spans import rates_of
from controlplane.events.services import record
from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.remaining import FEWEST_MATCHES

KEPT: Final = 20
"""Versions of one application; the oldest goes first."""
MOST_BYTES: Final = 4 * 2**20
"""Of a graph that is imported: 1,000 runs of 40 steps."""
CHANGED: Final = 0.05
"""Difference of a branch probability from which it counts as a change."""


def version_graph(version: GraphVersion) -> DemandGraph:
    return DemandGraph.from_json(zlib.decompress(version.graph))


def keep_version(
    application: Application, graph: DemandGraph, why: str, actor: User | str, now: datetime
) -> GraphVersion:
    """Keep *graph* as the next version of *application*; the oldest beyond `KEPT` go."""
    text, judged = graph.to_json(), quality(graph)
    with transaction.atomic():
        Application.objects.select_for_update(no_key=True).get(pk=application.pk)  # one version of a number
        newest = application.versions.aggregate(newest=Max("number"))["newest"] or 0
        version = GraphVersion.objects.create(
            application=application,
            number=newest + 1,
            made_at=now,
            made_by=actor if isinstance(actor, str) else actor.get_username(),
            why=why[:255],
            records=len(graph.records),
            error_s=judged.refined_s if judged else None,
            needed_s=judged.mean_s if judged else None,
            size_bytes=len(text),
            graph=zlib.compress(text),
        )
        application.versions.filter(number__lte=newest + 1 - KEPT).delete()
    return version


def keep_daily(now: datetime) -> int:
    """Keep a version of each application that has learned in the day since its last one; return how many."""
    kept = 0
    for application in Application.objects.filter(runs__ended_at__gte=now - DAY).distinct():
        last = application.versions.aggregate(last=Max("made_at"))["last"]
        if last is not None and now - last < DAY:
            continue
        new = application.runs.filter(learned(), imported=False)
        if last is not None and not new.filter(ended_at__gte=last).exists():
            continue
        graph = graph_of(application)
        if len(graph.records) >= FEWEST_MATCHES:
            keep_version(application, graph, "Learned, once a day", "follow-runs", now)
            kept += 1
    return kept


def read_graph(text: bytes) -> DemandGraph:
    """Return the graph in a file. Raise ValueError that says what is wrong and where."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"the graph has {len(text):,} bytes; {MOST_BYTES:,} are the most")
    graph = DemandGraph.from_json(text)
    if not graph.units:
        raise ValueError("units: the graph has none")
    return graph


def take_in(
    tenant: Tenant, graph: DemandGraph, actor: User, now: datetime, *, activate: bool = False
) -> tuple[Application, GraphVersion]:
    """Keep *graph*, which is imported, as a version of the application of its name, which is made if missing.

    *activate*: its records replace those that were imported before. Raises ValueError for a name that cannot be stored.
    """
    if not 1 <= len(graph.application) <= 80 or "\0" in graph.application:
        raise ValueError("application: a name has 1 to 80 characters, none of them NUL")
    if activate:
        application = import_graph(tenant, graph, now)
    else:
        application = application_to_fill(tenant, graph.application)
    version = keep_version(application, graph, "Imported" if activate else "Imported, to compare", actor, now)
    inputs = {"records": len(graph.records), "version": version.number, "active": activate}
    record("application.imported", application, actor=actor, inputs=inputs)
    return application, version


def restore(
    application: Application, version: GraphVersion, actor: User, reason: str, now: datetime
) -> GraphVersion | None:
    """Make the graph of *version* the present one; what was learned before is kept as a version, and returned.

    None if nothing was recorded.
    """
    graph, before = version_graph(version), graph_of(application)
    graph.application, kept = application.name, None
    if before.records:
        kept = keep_version(application, before, f"Before {version} was restored", actor, now)
    with transaction.atomic():
        import_graph(application.tenant, graph, now)
        Application.objects.filter(pk=application.pk).update(learns_from=now)
        record(
            "application.restored",
            application,
            actor=actor,
            reason=reason,
            before={"records": len(before.records), "version": kept.number if kept else None},
            after={"records": version.records, "version": version.number},
        )
    application.refresh_from_db()
    return kept


def freeze(application: Application, frozen: bool, actor: User, reason: str, now: datetime) -> bool:
    """Stop or resume learning; return whether that changed anything."""
    if frozen == (application.frozen_at is not None):
        return False
    application.frozen_at = now if frozen else None
    application.save(update_fields=["frozen_at"])
    kind = "application.frozen" if frozen else "application.unfrozen"
    record(kind, application, actor=actor, reason=reason, after={"frozen": frozen})
    return True


@dataclass(frozen=True)
class EdgeChange:
    """A branch whose probability differs."""

    before: str
    """Unit that leads to it; empty for the start."""
    after: str
    was: float
    now: float

    @property
    def points(self) -> float:
        return 100 * (self.now - self.was)


@dataclass(frozen=True)
class GraphComparison:
    """Two graphs of an application, the second against the first."""

    units: list[tuple[str, UnitSummary | None, UnitSummary | None]]
    """By name, with what each takes in either; None where it is missing."""
    edges: list[EdgeChange]
    """Those that changed by at least `CHANGED`, the largest change first."""
    records: tuple[int, int]
    service_s: tuple[float | None, float | None]
    """Mean service of a run."""
    errors: tuple[float | None, float | None]
    """Of predictions, as shares of what was needed."""

    @property
    def changed_units(self) -> int:
        return sum((was is None) != (now is None) or _backend(was) != _backend(now) for _, was, now in self.units)


def _backend(unit: UnitSummary | None) -> tuple[str, str] | None:
    return (unit.kind, unit.backend) if unit else None


def compared(before: DemandGraph, after: DemandGraph) -> GraphComparison:
    """Compare two graphs."""
    units = [{unit.name: unit for unit in unit_summaries(graph)} for graph in (before, after)]
    shares = [graph.branch_probabilities() if graph.records else {} for graph in (before, after)]
    edges = [
        EdgeChange(*edge, shares[0].get(edge, 0.0), shares[1].get(edge, 0.0)) for edge in {**shares[0], **shares[1]}
    ]
    judged = [quality(graph) for graph in (before, after)]
    errors = [each.refined_s / each.mean_s if each and each.mean_s else None for each in judged]
    service = [_mean_service_s(graph) for graph in (before, after)]
    return GraphComparison(
        units=[(name, units[0].get(name), units[1].get(name)) for name in {**units[0], **units[1]}],
        edges=sorted(
            (edge for edge in edges if abs(edge.now - edge.was) >= CHANGED), key=lambda edge: -abs(edge.points)
        ),
        records=(len(before.records), len(after.records)),
        service_s=(service[0], service[1]),
        errors=(errors[0], errors[1]),
    )


def _mean_service_s(graph: DemandGraph) -> float | None:
    rates = rates_of(graph.units)
    services = [graph.service_s(each, rates) for each in graph.records]
    return sum(services) / len(services) if services else None
