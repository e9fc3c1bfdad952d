"""Simulations by REST: asked for as rows, run by a worker, watched and cancelled on the way."""

import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.broker import send_task
from controlplane.simulation.models import SimulationRun, SimulationState
from scheduling.simulation.scenario import Scenario, ScenarioError
from scheduling.simulation.scenario.file import check_scenario

TASK: Final = "workers.tasks.simulation.run_simulation"
SOURCE: Final = Path("scenario")
"""What errors call a scenario that is no file."""
MOST_BYTES: Final = 256 * 1024
MOST_REQUESTS: Final = 2_000_000
"""Expected of the clients, bursts and the past that forecasters learn from included."""
MOST_INSTANCES: Final = 2_000
MOST_WAITING: Final = 10
MOST_KEPT: Final = 100
"""Runs; older ones are deleted when another is asked for."""
MOST_ROWS: Final = 5_000
"""Moves, and plans, that a result keeps."""
LOOK_S: Final = 1.0
"""Between two looks whether somebody cancelled."""
LIMIT_S: Final = 1800
"""Of one run, in a worker."""
LOST_AFTER: Final = timedelta(seconds=LIMIT_S + 120)
AGAIN_AFTER: Final = timedelta(minutes=1)
OPEN: Final = (SimulationState.QUEUED, SimulationState.RUNNING)


class Cancelled(Exception):
    """Somebody cancelled the simulation."""


def request_simulation(values: dict[str, Any], actor: User, reason: str = "") -> SimulationRun:
    """Have a worker run the scenario *values*. ScenarioError for a wrong or too large one, ActionError for too many."""
    scenario = checked(values)
    if SimulationRun.objects.filter(state__in=OPEN).count() >= MOST_WAITING:
        raise ActionError(f"{MOST_WAITING} simulations wait or run. Cancel one, or ask again later.")
    row = SimulationRun.objects.create(
        requested_by=actor, title=scenario.title[:160], scenario=values, seed=scenario.seed
    )
    record("simulation.requested", row, actor=actor, reason=reason)
    old = SimulationRun.objects.exclude(state__in=OPEN).order_by("-pk").values_list("pk", flat=True)[MOST_KEPT:]
    SimulationRun.objects.filter(pk__in=list(old)).delete()
    send_task(TASK, row.pk)
    return row


def checked(values: dict[str, Any]) -> Scenario:
    """The scenario *values*, of no file and within the limits. Raises ScenarioError, which names the key."""
    size = len(json.dumps(values))
    if size > MOST_BYTES:
        raise ScenarioError(SOURCE, 0, "", f"has {size:,} bytes; {MOST_BYTES:,} are the most")
    scenario = check_scenario(values, SOURCE)
    if scenario.trace is not None:
        raise ScenarioError(SOURCE, 0, "trace.file", "is read by `manage.py simulate` alone: give [[clients]] here")
    for number, client in enumerate(scenario.clients):
        if client.lengths is not None:
            what = "is read by `manage.py simulate` alone: give prompt and output here"
            raise ScenarioError(SOURCE, 0, f"clients[{number}].lengths.file", what)
    instances = sum((each.instances + each.spot + each.empty) * len(each.regions) for each in scenario.fleet)
    if instances > MOST_INSTANCES:
        raise ScenarioError(SOURCE, 0, "fleet", f"has {instances:,} instances; {MOST_INSTANCES:,} are the most")
    requests = expected_requests(scenario)
    if requests > MOST_REQUESTS:
        what = f"ask for some {requests:,.0f} requests; {MOST_REQUESTS:,} are the most"
        raise ScenarioError(SOURCE, 0, "clients", what)
    return scenario


def expected_requests(scenario: Scenario) -> float:
    """Of the clients, with bursts and the past that forecasters learn from."""
    bursts_h = sum(each.duration_min * each.factor / 60 for each in scenario.bursts)
    if (random := scenario.demand.random_bursts) is not None:
        bursts_h += random.count * random.duration_min * random.factor / 60
    past_h = 24 * 7 * -(-scenario.forecast.history_days // 7)
    hours = (scenario.demand.duration_h or 0.0) + bursts_h + past_h
    return 3600 * hours * sum(client.requests_per_s for client in scenario.clients)


def somebody_waits() -> bool:
    """Whether a simulation waits for a worker."""
    return SimulationRun.objects.filter(state=SimulationState.QUEUED).exists()


def run_requested(pk: int) -> str:
    """Run the simulation *pk*, if it still waits; its state afterwards."""
    if not _advance(pk, SimulationState.QUEUED, state=SimulationState.RUNNING, started_at=timezone.now()):
        return ""
    row = SimulationRun.objects.get(pk=pk)
    state, ended = SimulationState.DONE, dict[str, Any]()
    try:
        ended = {"result": _result(row), "progress": 1.0}
    except Cancelled:
        return SimulationState.CANCELLED
    except (ScenarioError, ValueError, RuntimeError) as error:
        state, ended = SimulationState.FAILED, {"error": str(error)}
    except BaseException as error:
        _end(row, SimulationState.FAILED, error=f"{type(error).__name__}: {error}")
        raise
    _end(row, state, **ended)
    return state


def _result(row: SimulationRun) -> dict[str, Any]:
    # Here, since they bring solvers and forecasters, of which a web process has no need.
    from controlplane.simulation.running import run
    from scheduling.simulation.staging import stage

    # The series is no part of the result, so none is kept.
    scenario = checked(row.scenario).model_copy(update={"sample_s": 0.0})
    looked_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal looked_s
        if time.monotonic() - looked_s < LOOK_S:
            return
        looked_s = time.monotonic()
        if not _advance(row.pk, SimulationState.RUNNING, progress=done / total):
            raise Cancelled

    result = run(scenario, SOURCE, stage(scenario, SOURCE, row.seed), progress=report).as_json()
    for name in ("moves", "plans"):
        result[f"{name}_made"], result[name] = len(result[name]), result[name][:MOST_ROWS]
    return result


def look_after(now: datetime) -> int:
    """Fail what a worker left behind, and have workers take up what waits because no broker answered; how many."""
    lost = SimulationRun.objects.filter(state=SimulationState.RUNNING, started_at__lt=now - LOST_AFTER)
    count = 0
    for row in lost.defer("scenario"):
        _end(row, SimulationState.FAILED, error="The worker that ran it is gone, or it took too long.")
        count += 1
    waiting = SimulationRun.objects.filter(state=SimulationState.QUEUED, requested_at__lt=now - AGAIN_AFTER)
    for pk in waiting.order_by("pk").values_list("pk", flat=True)[:1]:
        # One at a time: what is sent twice runs once, since only one worker finds it waiting.
        count += send_task(TASK, pk, expires_s=AGAIN_AFTER.total_seconds())
    return count


def cancel(row: SimulationRun, actor: User, reason: str = "") -> SimulationRun:
    """Cancel *row*; a worker that runs it stops within seconds. Raises ActionError if it has ended."""
    if not _rows(row.pk, *OPEN).update(state=SimulationState.CANCELLED, ended_at=timezone.now()):
        row.refresh_from_db()
        raise ActionError(f"It is {row.state}.")
    row.refresh_from_db()
    record("simulation.cancelled", row, actor=actor, reason=reason)
    return row


def _end(row: SimulationRun, state: SimulationState, **values: Any) -> None:
    if not _advance(row.pk, SimulationState.RUNNING, state=state, ended_at=timezone.now(), **values):
        return
    failed = state == SimulationState.FAILED
    severity = Severity.WARNING if failed else Severity.INFO
    reason = str(values.get("error", ""))[:255]
    record(f"simulation.{state}", row, actor="simulation", reason=reason, severity=severity)


def _advance(pk: int, before: SimulationState, **values: Any) -> bool:
    return bool(_rows(pk, before).update(**values))


def _rows(pk: int, *states: SimulationState) -> QuerySet[SimulationRun]:
    return SimulationRun.objects.filter(pk=pk, state__in=states)
