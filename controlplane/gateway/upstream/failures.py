"""How an instance fails a request, and what each failure means for it."""

import orjson

from controlplane.dispatch.port import BUSY
from controlplane.gateway.errors import ApiError

ERROR_MARK = b'data: {"error":'
ENGINE_DEAD = b"EngineCore encountered an issue"  # vLLM's EngineDeadError: its API server answers a few seconds longer
BUSY_STATUSES = frozenset({401, 500, 502, 503, 504})
"""Of the instance: another may do better. 401 is about our own token, never about the tenant's."""


class InstanceLost(Exception):
    """The instance failed before it sent a byte of the answer: the request may go to another.

    *failure*: `controlplane.dispatch.port.Left.failure`.
    """

    def __init__(self, reason: str, failure: str = "") -> None:
        super().__init__(reason)
        self.failure = failure


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


def engine_failure(events: bytes) -> "EngineFailed | None":
    """What an error inside a stream says about the instance; None if the request itself was at fault."""
    event = events[events.index(ERROR_MARK) :].partition(b"\n\n")[0]
    if ENGINE_DEAD in event:
        return EngineFailed("its engine died", dead=True)
    try:
        code = orjson.loads(event.removeprefix(b"data: "))["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return EngineFailed(f"its stream ended with error {code}") if isinstance(code, int) and code >= 500 else None


class EngineFailed(Exception):
    """The engine below an API server failed the request; *dead*: it will answer no other one either."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.dead = reason, dead


class RefusedByInstance(Exception):
    """The instance refused the request for good, and its own answer has been passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"refused with {status}")
        self.code, self.status, self.message = "refused_by_instance", status, message
