"""How an instance fails a request, and what each failure means for it."""

from controlplane.dispatch.port import BUSY
from controlplane.gateway.errors import ApiError

ENGINE_DEAD = b"EngineCore encountered an issue"  # vLLM's EngineDeadError: its API server answers a few seconds longer
BUSY_STATUSES = frozenset({401, 500, 502, 503, 504})
"""Of the instance: another may do better. 401 is about our own token, never about the tenant's."""


class InstanceLost(Exception):
    """The instance failed before it sent a byte of the answer: the request may go to another.

    *failure*: `controlplane.dispatch.port.Left.failure`. *came*: what came in place of an answer, as its tenant may know it.
    """

    def __init__(self, reason: str, failure: str = "", came: str = "") -> None:
        super().__init__(reason)
        self.failure, self.came = failure, came


class InstanceBusy(InstanceLost):
    """The instance takes no more for a while, by its own word. *error* is the tenant's answer if no other can take it."""

    def __init__(self, reason: str, status: int, message: str, wait_s: float) -> None:
        super().__init__(reason, BUSY)
        self.wait_s = wait_s
        self.error = ApiError(
            status,
            message or "Every instance that could take the request is busy.",
            type="rate_limit_error" if status == 429 else "server_error",
            code="instance_busy",
            retry_after_s=wait_s,
        )


class Evicted(Exception):
    """The instance was left because others need it; what was emitted is kept, and the request comes back to the queue."""


class Interrupted(ApiError):
    """The instance failed after the first byte. *failure*: as above; *reason*: `controlplane.dispatch.port.Left.reason`."""

    def __init__(self, failure: str, reason: str = "") -> None:
        super().__init__(
            502,
            "The instance that served this request failed before the answer was complete.",
            type="server_error",
            code="upstream_interrupted",
            retry_after_s=1,
        )
        self.failure, self.reason = failure, reason


class EngineFailed(Exception):
    """An instance gave no answer to the request. *reason*: what came instead; *dead*: it will answer no other one either."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.dead = reason, dead


class Refusal(ApiError):
    """The instance's own word on a bad request, for its tenant; *number*: its code, where that is a number."""

    def __init__(
        self, status: int, message: str, *, type: str, param: str | None, code: str, number: int | None
    ) -> None:
        super().__init__(status, message, type=type, param=param, code=code)
        self.number = number

    def fields(self) -> dict[str, object]:
        return super().fields() | ({"code": self.number} if self.number is not None else {})


class RefusedByInstance(Exception):
    """The instance refused the request for good, and its own answer has been passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"refused with {status}")
        self.code, self.status, self.message = "refused_by_instance", status, message
