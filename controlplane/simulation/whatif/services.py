"""Writes of what-ifs: submission, cancelling, resuming, and more seeds."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif import working
from controlplane.simulation.whatif.asking import AS_NOW, title_of
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import LETTERS, Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import MAX_REQUESTS, Start
from controlplane.simulation.whatif.starts.nodes import resolved
from controlplane.simulation.whatif.starts.traces import misfits
from controlplane.simulation.whatif.timing import expected
from controlplane.simulation.whatif.twin_errors import fleet_error
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.applications import expected_calls

MAX_KEPT: Final = 200
"""Maximum stored what-ifs; older ended ones are deleted, except those that became a plan."""
MAX_OPEN: Final = 10
MAX_SEEDS: Final = 100
MAX_HORIZON_S: Final = 7 * 86_400.0
MAX_INSTANCES: Final = 2_000
FIELDS: Final = ("title", "start", "horizon_s", "warmup_s", "seeds", "edits", "asked", "nightly")


@transaction.atomic
def write(values: Mapping[str, Any], futures: Sequence[Mapping[str, Any]], actor: User | str) -> WhatIf:
    """Create a what-if for `submit`: *values* of FIELDS, and *futures* other than A as {name, changes}.

    Raises ValidationError for more futures than letters, or an unknown graph.
    """
    if len(futures) >= len(LETTERS):
        raise ValidationError({"futures": f"{len(futures)} besides A; {len(LETTERS) - 1} are the most."})
    row = WhatIf(requested_by=_user(actor), **{name: values[name] for name in FIELDS if name in values})
    scenario, given = row.start.get("scenario", {}), [{"name": AS_NOW}, *futures]
    try:
        row.edits, *changes = [
            resolved(each, scenario) for each in (row.edits, *(one.get("changes", []) for one in given))
        ]
    except ChangeError as error:
        raise ValidationError({error.field: error.what}) from error
    row.title = row.title[:160] or title_of(scenario, row.edits, futures)
    row.full_clean(exclude=["requested_by"])
    row.save()
    for letter, one, own in zip(LETTERS, given, changes, strict=False):
        future = Future(what_if=row, letter=letter, name=one.get("name") or letter, changes=own)
        future.full_clean()
        future.save()
    return row


def future_of(name: str, preset: str, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a future for `write`: the changes of *preset*, if any, then *changes*. Raises ValidationError."""
    if preset and preset not in PRESETS:
        raise ValidationError({"preset": f"There is no preset {preset!r}; there is {', '.join(PRESETS)}."})
    taken = PRESETS[preset].changes if preset else ()
    return {"name": name or (PRESETS[preset].title if preset else "Custom"), "changes": [*taken, *changes]}


def check(row: WhatIf) -> dict[str, str]:
    """Return problems of *row* by field, such as `B.changes[0].region`; empty if it can run."""
    try:
        start = Start.model_validate(row.start)
    except ValueError as error:
        return {"start": re.sub(r"\s+", " ", str(error))[:200]}
    wrong = dict[str, str]()
    if not 60 <= row.horizon_s <= MAX_HORIZON_S:
        wrong["horizon_s"] = f"is {row.horizon_s:g}; from 60 s to {MAX_HORIZON_S / 86_400:.0f} days can be simulated"
    if not 0 <= row.warmup_s < row.horizon_s:
        wrong["warmup_s"] = f"is {row.warmup_s:g}; it must be shorter than the horizon"
    if not 1 <= row.seeds <= MAX_SEEDS:
        wrong["seeds"] = f"is {row.seeds}; from 1 to {MAX_SEEDS} can be simulated"
    try:
        edits = parsed(row.edits, "edits")
    except ChangeError as error:
        wrong[error.field] = error.what
        return wrong
    if (
        start.arrivals["kind"] == "forecast"
        and not wrong
        and (count := expected(start, row.horizon_s, edits)) > MAX_REQUESTS
    ):
        wrong["horizon_s"] = f"has some {count:,.0f} requests; {MAX_REQUESTS:,} are the most"
        return wrong
    if start.is_quiet and not any(edit["kind"] in ("tenant", "application") for edit in row.edits):
        wrong["edits"] = "no requests came in the last hour, so none are expected: add a tenant or an application"
    for future in row.futures.all():
        try:
            changed = working.changed(row, future, start)
        except ChangeError as error:
            field = error.field if error.field.startswith("edits") else f"{future.letter}.{error.field}"
            wrong[field] = error.what
            continue
        if start.arrivals["kind"] == "file":
            for key, what in misfits(start.arrivals, changed.scenario).items():
                wrong.setdefault(f"begin.trace_keys.{key}", what)
        if (unfit := _unfit(changed.scenario, start.asks)) is not None:
            key, what = unfit
            wrong["start" if key.endswith("file") else f"{future.letter}.changes"] = what
    return wrong


def _unfit(scenario: Scenario, asks: bool) -> tuple[str, str] | None:
    """Return the key of *scenario* that prevents a run, and why; None if it can run."""
    read = [f"clients[{at}].lengths.file" for at, each in enumerate(scenario.clients) if each.lengths is not None]
    for at, each in enumerate(scenario.applications):
        read += [f"applications[{at}].graph"] * isinstance(each.graph, str)
        read += [f"applications[{at}].arrivals.file"] * (each.arrivals is not None)
    if read := ["trace.file"] if scenario.trace is not None else read:
        what = "reads a file, as `manage.py simulate` alone does"
        return read[0], what if "applications" in read[0] else f"{what}: upload a trace, or give prompt and output"
    instances = sum((each.instances + each.spot + each.empty) * len(each.regions) for each in scenario.fleet)
    if instances > MAX_INSTANCES:
        return "fleet", f"{instances:,} instances; {MAX_INSTANCES:,} are the most"
    if asks and (count := _expected_requests(scenario)) > MAX_REQUESTS:
        return "clients", f"some {count:,.0f} requests; {MAX_REQUESTS:,} are the most"
    return None


def _expected_requests(scenario: Scenario) -> float:
    """Return the expected requests of clients and applications, with bursts and the past that forecasters learn from."""
    bursts_h = sum(each.duration_min * each.factor / 60 for each in scenario.bursts)
    if (random := scenario.demand.random_bursts) is not None:
        bursts_h += random.count * random.duration_min * random.factor / 60
    past_h = 24 * 7 * -(-scenario.forecast.history_days // 7)
    hours = (scenario.demand.duration_h or 0.0) + bursts_h + past_h
    return 3600 * hours * sum(client.requests_per_s for client in scenario.clients) + expected_calls(scenario)


@transaction.atomic
def submit(row: WhatIf, actor: User | str) -> WhatIf:
    """Submit *row*, of `write`. Raises ActionError if too many wait or it was submitted, ValidationError as `check`."""
    if wrong := check(row):
        raise ValidationError(wrong)
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if row.submitted_at is not None:
        raise ActionError(f"It is {row.state}.")
    if WhatIf.objects.filter(state__in=working.OPEN, submitted_at__isnull=False).count() >= MAX_OPEN:
        raise ActionError(f"{MAX_OPEN} what-ifs wait or run. Cancel one, or ask again later.")
    row.submitted_at, row.twin_error = timezone.now(), fleet_error()
    row.save(update_fields=["submitted_at", "twin_error"])
    _add_runs(row)
    futures = {future.letter: future.name for future in row.futures.all()}
    record("what_if.requested", row, actor=actor, inputs={"futures": futures, "seeds": row.seeds})
    old = WhatIf.objects.exclude(state__in=working.OPEN).filter(plan={}).order_by("-pk")
    WhatIf.objects.filter(pk__in=list(old.values_list("pk", flat=True)[MAX_KEPT:])).delete()
    transaction.on_commit(working.send_workers)
    return row


@transaction.atomic
def ask(values: Mapping[str, Any], futures: Sequence[Mapping[str, Any]], actor: User | str) -> WhatIf:
    """Create and submit a what-if atomically. Raises as `write` and `submit`."""
    return submit(write(values, futures, actor), actor)


@transaction.atomic
def cancel(row: WhatIf, actor: User | str, reason: str = "") -> WhatIf:
    """Cancel *row*; workers stop within seconds and finished runs stay. Raises ActionError."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if row.state not in working.OPEN:
        raise ActionError(f"It is {row.state}.")
    runs = FutureSeed.objects.filter(future__what_if=row, state__in=working.OPEN)
    runs.update(state=WhatIfState.CANCELLED, ended_at=timezone.now(), task="")
    row.state, row.ended_at = WhatIfState.CANCELLED, timezone.now()
    row.ended_by = actor if isinstance(actor, str) else actor.get_username()
    row.save(update_fields=["state", "ended_at", "ended_by"])
    record("what_if.cancelled", row, actor=actor, reason=reason)
    return row


@transaction.atomic
def resume(row: WhatIf, actor: User | str) -> WhatIf:
    """Rerun the cancelled or failed runs of *row*. Raises ActionError if there are none."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    missing = FutureSeed.objects.filter(future__what_if=row, state__in=(WhatIfState.CANCELLED, WhatIfState.FAILED))
    if not missing.update(state=WhatIfState.QUEUED, attempts=0, error="", progress=0.0, ended_at=None):
        raise ActionError("Nothing is missing.")
    _reopen(row)
    record("what_if.resumed", row, actor=actor)
    return row


@transaction.atomic
def add_seeds(row: WhatIf, count: int, actor: User) -> WhatIf:
    """Add *count* seeds to every future of *row*, which narrows its intervals. Raises ActionError."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if not 1 <= count <= MAX_SEEDS - row.seeds:
        raise ActionError(f"{row.seeds} repetitions are there, and {MAX_SEEDS} are the most.")
    row.seeds += count
    row.save(update_fields=["seeds"])
    _add_runs(row)
    _reopen(row)
    record("what_if.seeds_added", row, actor=actor, inputs={"seeds": row.seeds})
    return row


@transaction.atomic
def delete(row: WhatIf, actor: User) -> None:
    """Delete *row* with its runs. Raises ActionError while it waits or runs, or if it became a plan."""
    if row.state in working.OPEN or row.plan:
        raise ActionError("A plan was made of it." if row.plan else f"It is {row.state}: cancel it first.")
    record("what_if.deleted", row, actor=actor)
    row.delete()


def _user(actor: User | str) -> User | None:
    return actor if isinstance(actor, User) else None


def _reopen(row: WhatIf) -> None:
    row.state, row.ended_at, row.ended_by = WhatIfState.QUEUED, None, ""
    row.save(update_fields=["state", "ended_at", "ended_by"])
    transaction.on_commit(working.send_workers)


def _add_runs(row: WhatIf) -> None:
    """Add runs of all seeds of *row*, from 1."""
    seeds = range(1, 1 + row.seeds)
    FutureSeed.objects.bulk_create(
        [FutureSeed(future=future, seed=seed) for future in row.futures.all() for seed in seeds], ignore_conflicts=True
    )
