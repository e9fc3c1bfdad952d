"""Writes of what-ifs: drafts, submission, cancelling, resuming, more seeds, and choices."""

import json
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
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import LETTERS, Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import MOST_REQUESTS, Start
from controlplane.simulation.whatif.starts.nodes import with_instances
from controlplane.simulation.whatif.starts.traces import misfits
from controlplane.simulation.whatif.timing import expected
from controlplane.simulation.whatif.twin_errors import fleet_error
from scheduling.simulation.scenario import Scenario, ScenarioError
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging import SOURCE
from scheduling.simulation.staging.applications import expected_calls

AS_NOW: Final = "As now"
MOST_KEPT: Final = 200
"""Maximum stored what-ifs; older ended ones are deleted, except those that became a plan."""
MAX_OPEN: Final = 10
MOST_SEEDS: Final = 100
MOST_HORIZON_S: Final = 7 * 86_400.0
MOST_INSTANCES: Final = 2_000
MOST_BYTES: Final = 256 * 1024
"""Maximum size of a scenario simulated by itself."""
FIELDS: Final = (
    "title",
    "start",
    "horizon_s",
    "warmup_s",
    "seeds",
    "edits",
    "slo_target",
    "asked",
    "nightly",
)


@transaction.atomic
def save_draft(
    row: WhatIf | None, values: Mapping[str, Any], futures: Sequence[Mapping[str, Any]] | None, actor: User | str
) -> WhatIf:
    """Create a draft, or change *row*: *values* of FIELDS, and *futures* other than A as {name, changes}.

    Incomplete drafts are allowed; `submit` checks them. Raises ActionError unless *row* is a draft, ValidationError for
    more futures than letters.
    """
    if row is not None and row.state != WhatIfState.DRAFT:
        raise ActionError("Only a draft can be changed. Edit a copy.")
    row = row or WhatIf(requested_by=_user(actor))
    for name in FIELDS:
        if name in values:
            setattr(row, name, values[name])
    scenario = row.start.get("scenario", {})
    row.edits = with_instances(row.edits, scenario)
    row.title = (row.title or "What if …")[:160]
    row.full_clean(exclude=["requested_by", "chosen"])
    row.save()
    if futures is not None:
        if len(futures) >= len(LETTERS):
            raise ValidationError({"futures": f"{len(futures)} besides A; {len(LETTERS) - 1} are the most."})
        row.futures.all().delete()
        given = [{"name": AS_NOW, "changes": []}, *futures]
        for letter, one in zip(LETTERS, given, strict=False):
            changes = with_instances(one.get("changes", []), scenario)
            future = Future(what_if=row, letter=letter, name=one.get("name") or letter, changes=changes)
            future.full_clean()
            future.save()
    elif not row.futures.exists():
        Future.objects.create(what_if=row, letter=LETTERS[0], name=AS_NOW)
    return row


def future_of(name: str, preset: str, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a future for `save_draft`: the changes of *preset*, if any, then *changes*. Raises ValidationError."""
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
    if not 60 <= row.horizon_s <= MOST_HORIZON_S:
        wrong["horizon_s"] = f"is {row.horizon_s:g}; from 60 s to {MOST_HORIZON_S / 86_400:.0f} days can be simulated"
    if not 0 <= row.warmup_s < row.horizon_s:
        wrong["warmup_s"] = f"is {row.warmup_s:g}; it must be shorter than the horizon"
    if not 1 <= row.seeds <= MOST_SEEDS:
        wrong["seeds"] = f"is {row.seeds}; from 1 to {MOST_SEEDS} can be simulated"
    try:
        edits = parsed(row.edits, "edits")
    except ChangeError as error:
        wrong[error.field] = error.what
        return wrong
    if (
        start.arrivals["kind"] == "forecast"
        and not wrong
        and (count := expected(start, row.horizon_s, edits)) > MOST_REQUESTS
    ):
        wrong["horizon_s"] = f"has some {count:,.0f} requests; {MOST_REQUESTS:,} are the most"
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
    if instances > MOST_INSTANCES:
        return "fleet", f"{instances:,} instances; {MOST_INSTANCES:,} are the most"
    if asks and (count := _expected_requests(scenario)) > MOST_REQUESTS:
        return "clients", f"some {count:,.0f} requests; {MOST_REQUESTS:,} are the most"
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
def simulate_scenario(values: dict[str, Any], actor: User, reason: str = "") -> WhatIf:
    """Submit the scenario *values* by itself: a what-if of one future, with the scenario's seed.

    Raises ScenarioError for an invalid or too large scenario, ActionError if too many wait.
    """
    size = len(json.dumps(values))
    if size > MOST_BYTES:
        raise ScenarioError(SOURCE, 0, "", f"has {size:,} bytes; {MOST_BYTES:,} are the most")
    scenario = check_scenario(values, SOURCE)
    if (unfit := _unfit(scenario, asks=True)) is not None:
        raise ScenarioError(SOURCE, 0, *unfit)
    ends_h = [each.from_h + each.window_h for each in scenario.applications if each.window_h is not None]
    ends_h += [each.from_h + max(each.begins_s) / 3600 for each in scenario.applications if each.begins_s is not None]
    asks_h = max([scenario.demand.duration_h or 0.0, *ends_h])
    lasts_h = [asks_h] if scenario.until_h is None else [asks_h, scenario.until_h]
    start = Start(kind="scenario", at=timezone.now(), scenario=values).model_dump(mode="json")
    horizon_s = max(60.0, 3600 * min(lasts_h))
    title = scenario.title or "Scenario"
    row = save_draft(None, {"title": title, "start": start, "horizon_s": horizon_s, "seeds": 1}, [], actor)
    return _queue(row, actor, reason)


def submit(row: WhatIf, actor: User | str) -> WhatIf:
    """Submit the draft *row*. Raises ActionError if it is none, or too many wait; ValidationError as `check`."""
    if wrong := check(row):
        raise ValidationError(wrong)
    return _queue(row, actor)


@transaction.atomic
def _queue(row: WhatIf, actor: User | str, reason: str = "") -> WhatIf:
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if row.state != WhatIfState.DRAFT:
        raise ActionError(f"It is {row.state}.")
    if WhatIf.objects.filter(state__in=working.OPEN).count() >= MAX_OPEN:
        raise ActionError(f"{MAX_OPEN} what-ifs wait or run. Cancel one, or ask again later.")
    row.state, row.submitted_at, row.requested_by = WhatIfState.QUEUED, timezone.now(), _user(actor)
    row.twin_error = fleet_error()
    row.save(update_fields=["state", "submitted_at", "requested_by", "twin_error"])
    _add_runs(row)
    futures = {future.letter: future.name for future in row.futures.all()}
    record("what_if.requested", row, actor=actor, reason=reason, inputs={"futures": futures, "seeds": row.seeds})
    old = WhatIf.objects.exclude(state__in=(*working.OPEN, WhatIfState.DRAFT)).filter(plan={}).order_by("-pk")
    WhatIf.objects.filter(pk__in=list(old.values_list("pk", flat=True)[MOST_KEPT:])).delete()
    transaction.on_commit(working.send_workers)
    return row


@transaction.atomic
def ask(values: Mapping[str, Any], futures: Sequence[Mapping[str, Any]], actor: User | str) -> WhatIf:
    """Create and submit a what-if atomically. Raises as `save_draft` and `submit`."""
    return submit(save_draft(None, values, futures, actor), actor)


@transaction.atomic
def cancel(row: WhatIf, actor: User | str, reason: str = "", letter: str = "") -> WhatIf:
    """Cancel *row*, or one future of it; workers stop within seconds and finished runs stay. Raises ActionError."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if row.state not in working.OPEN:
        raise ActionError(f"It is {row.state}.")
    runs = FutureSeed.objects.filter(future__what_if=row, state__in=working.OPEN)
    if letter:
        runs = runs.filter(future__letter=letter)
        if not runs.exists():
            raise ActionError(f"Nothing of {letter} waits or runs.")
    runs.update(state=WhatIfState.CANCELLED, ended_at=timezone.now(), task="")
    if not FutureSeed.objects.filter(future__what_if=row, state__in=working.OPEN).exists():
        whole = not FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.CANCELLED).exists()
        row.state = WhatIfState.DONE if whole else WhatIfState.CANCELLED
        row.ended_at, row.ended_by = timezone.now(), actor if isinstance(actor, str) else actor.get_username()
        row.save(update_fields=["state", "ended_at", "ended_by"])
    record("what_if.cancelled", row, actor=actor, reason=reason, inputs={"future": letter} if letter else {})
    return row


@transaction.atomic
def resume(row: WhatIf, actor: User | str, letter: str = "") -> WhatIf:
    """Rerun the cancelled or failed runs of *row* or one future. Raises ActionError if there are none."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    missing = FutureSeed.objects.filter(future__what_if=row, state__in=(WhatIfState.CANCELLED, WhatIfState.FAILED))
    if letter:
        missing = missing.filter(future__letter=letter)
    if not missing.update(state=WhatIfState.QUEUED, attempts=0, error="", progress=0.0, ended_at=None):
        raise ActionError("Nothing is missing.")
    _reopen(row)
    record("what_if.resumed", row, actor=actor, inputs={"future": letter} if letter else {})
    return row


@transaction.atomic
def add_seeds(row: WhatIf, count: int, actor: User) -> WhatIf:
    """Add *count* seeds to every future of *row*, which narrows its intervals. Raises ActionError."""
    row = WhatIf.objects.select_for_update().get(pk=row.pk)
    if row.state == WhatIfState.DRAFT:
        raise ActionError("It is a draft.")
    if not 1 <= count <= MOST_SEEDS - row.seeds:
        raise ActionError(f"{row.seeds} seeds are there, and {MOST_SEEDS} are the most.")
    row.seeds += count
    row.save(update_fields=["seeds"])
    _add_runs(row)
    _reopen(row)
    record("what_if.seeds_added", row, actor=actor, inputs={"seeds": row.seeds})
    return row


def choose(row: WhatIf, letter: str) -> WhatIf:
    """Store the selected future. Raises ActionError if there is no such future."""
    future = row.futures.filter(letter=letter).first()
    if future is None:
        raise ActionError(f"There is no future {letter}.")
    row.chosen = future
    row.save(update_fields=["chosen"])
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
    """Add runs of all seeds of *row*: from 1, or from the seed of a scenario simulated by itself."""
    first = row.start["scenario"].get("seed", 0) if row.start.get("kind") == "scenario" else 1
    seeds = range(first, first + row.seeds)
    FutureSeed.objects.bulk_create(
        [FutureSeed(future=future, seed=seed) for future in row.futures.all() for seed in seeds], ignore_conflicts=True
    )
