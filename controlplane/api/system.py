"""`/api/system`: how periodic jobs and the parts of the stack stand."""

from typing import Any

from ninja import Router

from controlplane.accounts.models import Role
from controlplane.api.callers import PEOPLE, ApiRequest
from controlplane.api.schemas import Described
from controlplane.jobs import monitor
from controlplane.jobs.parts import PartState
from controlplane.jobs.record import JobState

router = Router(auth=PEOPLE)


class JobOut(Described):
    name: str
    kind: str
    """`celery` or `gateway`: what runs it."""
    state: JobState
    """`late`: not done for two periods; `never`: has not run yet and is not late."""
    period_s: float
    last_success_at: float | None
    """Epoch seconds, as all times here."""
    last_error: str
    last_error_at: float | None
    failures_in_a_row: int
    failures_total: int
    last_duration_s: float | None
    due_at: float | None


class PartOut(Described):
    name: str
    state: PartState
    detail: str
    since: float | None
    """When it came into this state, epoch seconds."""
    restarts: int | None
    """Null where Pilothouse does not start it."""
    process_id: int | None


class SystemOut(Described):
    jobs: list[JobOut]
    parts: list[PartOut]


@router.get("/system", response=SystemOut, tags=["Records"])
def get_system(request: ApiRequest) -> dict[str, Any]:
    """Periodic jobs and parts of the stack, as this web process sees them. For operators."""
    request.auth.require(Role.OPERATOR)
    return monitor.report()
