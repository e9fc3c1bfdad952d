"""What becomes of a request beside what was asked: state, moments, tokens and outcome, until its ledger row is written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import orjson
from msgspec import Struct, structs, to_builtins

from controlplane.dispatch import port
from controlplane.gateway.admission.keys import Grant, SloTerms
from controlplane.gateway.admission.validation import Call
from controlplane.gateway.errors import ApiError
from controlplane.gateway.models import Outcome
from controlplane.gateway.upstream.answers import RefusedByInstance, Usage
from controlplane.gateway.upstream.connections import Connection
from controlplane.gateway.upstream.continuation import Kept
from controlplane.lengths.length_service import Prediction
from scheduling.routing.models import ModelRule
from scheduling.simulation.workload import prefix_groups

if TYPE_CHECKING:
    from opentelemetry.trace import Span

READ_S = 0.1
"""Time for which a client may read on after its instance has ended, without a separate entry."""


class RequestState(IntEnum):
    ACCEPTED = 0  # authenticated and validated
    WAITING = 1  # held in its endpoint's queue
    PLACED = 2  # given to an instance, no byte back yet
    STREAMING = 3  # bytes are coming back
    DONE = 4
    FAILED = 5
    CANCELLED = 6
    REJECTED = 7


_S = RequestState
MOVES = {
    _S.ACCEPTED: {_S.WAITING, _S.FAILED, _S.CANCELLED, _S.REJECTED},
    _S.WAITING: {_S.PLACED, _S.FAILED, _S.CANCELLED, _S.REJECTED},
    _S.PLACED: {_S.STREAMING, _S.WAITING, _S.DONE, _S.FAILED, _S.CANCELLED},
    _S.STREAMING: {_S.WAITING, _S.DONE, _S.FAILED, _S.CANCELLED},
}
"""From each state; WAITING again where its instance died or gave it up."""
OUTCOMES = {
    _S.DONE: Outcome.DONE.value,
    _S.FAILED: Outcome.FAILED.value,
    _S.CANCELLED: Outcome.CANCELLED.value,
    _S.REJECTED: Outcome.REJECTED.value,
}


class IllegalMove(RuntimeError):
    def __init__(self, before: RequestState, after: RequestState) -> None:
        super().__init__(f"a request that is {before.name.lower()} cannot become {after.name.lower()}")


class Interrupt(Enum):
    """Reason for which a request's task is cancelled from outside."""

    DISCONNECT = "the client went away"
    INSTANCE_LOST = "the instance stopped answering"
    RECLAIMED = "the donated instance was reclaimed"
    STOPPED = "its run was stopped"
    STANDING_BY = "another process owns the regions"
    KEY_ENDED = "its API key may no longer be used"


class Progress(Struct, eq=False, kw_only=True):
    """One request on the HTTP side, from its arrival to its ledger row. Moments are seconds of the event loop's clock.

    A ledger column is the field or property of its name here, or else in `asked` (`ledger.entry`).
    """

    asked: port.Asked  # as it is served: of the class and model that it was degraded or fell back to
    grant: Grant
    terms: SloTerms
    call: Call
    length: Prediction | None = None
    run_limits: tuple[float | None, float | None] = (None, None)  # tokens and dollars of its whole run, as it says
    trace_context: tuple[tuple[str, str], ...] = ()  # headers for the instance
    span: Span | None = None  # None: it is not traced
    budget_warnings: tuple[str, ...] = ()  # budgets above their soft limit

    state: RequestState = RequestState.ACCEPTED
    region: str = ""  # where it waits or runs
    caller_region: str = ""  # where it counts as demand
    instance: str = ""  # the last one
    attempts: int = 0
    evictions: int = 0  # times it was taken from an instance and queued again
    asked_class: str = ""  # SLO class that it was degraded from; empty: it kept its class
    queue_position: int | None = None  # set when it was queued, as the next two; 0: it did not wait
    estimated_wait_s: float | None = None  # None while queued: the pace was unknown
    estimated_wait_p99_s: float | None = None
    expected_cached_tokens: int | None = None  # as the router by delay expected; None by other routers
    expected_by: str = ""  # how it knew: `port.KV_EVENTS` or `port.ESTIMATE`
    status_code: int = 0  # while it runs, of its error
    error_code: str = ""
    error_message: str = ""  # as answered to its tenant
    lost: bool = False  # of a batch line: another execution's answer is kept, and paid

    predicted_tokens: float = 0.0  # possible output
    prompt_tokens: int = 0  # of what an instance worked for: as predicted, until it reports them
    output_tokens: int = 0
    cached_tokens: int | None = None  # of its prompt, as its instance reports; None: it does not
    kept_tokens: int = 0  # output of earlier instances, which the present one continues
    reported_tokens: int | None = None  # output tokens reported to the dispatcher; None: not even its start

    queued_s: float = 0.0  # when its length was predicted
    released_s: float = 0.0  # by the queue manager; 0 where it was not held
    placed_s: float = 0.0
    worked: list[tuple[str, float, float]] = []  # (instance, begin, end): an engine worked for it
    first_token_s: float = 0.0
    first_token_heard: bool = False  # else that is when the whole answer came
    finished_s: float = 0.0
    steps: list[dict[str, Any]] = []  # of its decision trace

    task: asyncio.Task[object] | None = None
    interrupted: Interrupt | None = None
    placement: asyncio.Future[port.Placed] | None = None
    kept: Kept | None = None  # where it may be evicted
    evicting: bool = False
    leave_instance: Callable[[], None] | None = None  # while an instance answers, as is the next one
    connection: Connection | None = None
    busy: ApiError | None = None  # from the last busy instance
    adapter_failed: bool = False  # its instance could not load its adapter

    # Columns of the ledger

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.state]

    @property
    def own_region(self) -> str:
        """Where it counts as demand, where that is another region."""
        return "" if self.caller_region == self.region else self.caller_region

    @property
    def predicted_prompt_tokens(self) -> int:
        return self.asked.prompt_tokens if self.call.kind.computes else 0

    @property
    def predicted_output_tokens(self) -> int:
        return int(self.predicted_tokens) if self.call.kind.generates else 0

    @property
    def queue_ms(self) -> float | None:
        return (self.placed_s - self.asked.arrived_s) * 1000 if self.placed_s else None

    @property
    def ttft_ms(self) -> float | None:
        return (self.first_token_s - self.asked.arrived_s) * 1000 if self.first_token_heard else None

    @property
    def itl_ms(self) -> float | None:
        sequences = self.asked.sequences
        if not self.first_token_heard or self.output_tokens <= sequences:
            return None
        return (self.finished_s - self.first_token_s) * 1000 / (self.output_tokens / sequences - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.finished_s - self.asked.arrived_s) * 1000

    @property
    def slo_met(self) -> bool | None:
        """Whether it kept the promise of its class; None if that promises nothing, or its tenant ended or spoilt it."""
        if self.state is RequestState.DONE:
            return self.terms.met(self.ttft_ms, self.itl_ms, self.e2e_ms)
        spoilt = self.state is RequestState.CANCELLED or 400 <= self.status_code < 429
        return None if spoilt or not self.terms.promises else False

    @property
    def unserved(self) -> bool:
        """Whether it was demand of the fleet and got no token.

        A request refused by its tenant's quota never reached the dispatcher; one that an instance refused as bad asked for
        nothing that can be served.
        """
        if self.placement is None or self.first_token_s or self.state is RequestState.DONE:
            return False
        return not 400 <= self.status_code < 429

    @property
    def ran(self) -> str | None:
        """When instances worked for it, as JSON; None where its last one did from its placement to its end."""
        if [each[:2] for each in self.worked] == [(self.instance, self.placed_s)]:
            if self.finished_s - self.worked[0][2] < READ_S:
                return None
        elif not self.worked:
            return None
        arrived_s = self.asked.arrived_s
        ran = [(name, *(round((at_s - arrived_s) * 1000, 3) for at_s in span)) for name, *span in self.worked]
        return orjson.dumps(ran).decode()

    @property
    def prefix_groups(self) -> str:
        return prefix_groups.as_text(self.asked.prefix_hashes, self.asked.block_tokens)

    @property
    def trace(self) -> str:
        """Its decisions as JSON that every database takes: PostgreSQL's has no NUL."""
        try:
            text = orjson.dumps(self.steps).decode()
        except TypeError:  # a number of more than 64 bits, or half of a character
            text = json.dumps(self.steps, ensure_ascii=False, default=str)
        return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text

    # What happens to it

    def move(self, to: RequestState) -> None:
        """Move to state *to*. Raises IllegalMove, naming both states."""
        if to not in MOVES.get(self.state, ()):
            raise IllegalMove(self.state, to)
        self.state = to

    def fail(self, error: ApiError | RefusedByInstance, to: RequestState = RequestState.FAILED) -> None:
        """Move to state *to* with the error that the tenant is answered with."""
        self.error_code, self.error_message, self.status_code = error.code, error.message[:500], error.status
        self.move(to)

    def queued(self, record: port.Queued | port.Held | port.Rerouted | port.FellBack) -> None:
        """Note where it waits from now on."""
        self.region, self.predicted_tokens = record.region, record.predicted_tokens

    def placed(self, record: port.Placed) -> None:
        self.move(RequestState.PLACED)
        self.placed_s, self.attempts = record.placed_s, record.attempt
        self.region, self.instance = record.region, record.instance
        self.expected_cached_tokens, self.expected_by = record.why.cached_tokens, record.why.cached_by
        waited_ms = round((record.placed_s - self.asked.arrived_s) * 1000, 3)
        where = {"instance": record.instance, "region": record.region, "ordering": record.ordering}
        self.steps.append(where | {"waited_ms": waited_ms} | to_builtins(record.why))

    def forward(self, record: port.Forward, now_s: float) -> None:
        """Be asked in another zone from now on."""
        asked, zones = self.asked, self.asked.zones or ("",)
        after_ms = round((now_s - asked.arrived_s) * 1000, 3)
        way = " to ".join(f"zone {zone}" if zone else "no zone" for zone in (zones[-1], record.zone))
        self.steps.append({"forwarded": way, "after_ms": after_ms})
        own_region = self.caller_region = self.caller_region or record.own_region
        self.asked = structs.replace(asked, zones=(*zones, record.zone), own_region=own_region)

    def fall_back(self, record: port.FellBack) -> None:
        """Become a request of the fallback of its model: predicted, counted and billed as that."""
        asked = self.asked
        self.asked = structs.replace(
            asked,
            model=record.model,
            fallback="",
            adapter="",
            asked_model=asked.asked_model or self.call.model,
            model_rule=record.rule,
        )
        self.call.ask_for(record.model)
        self.queued(record)
        self.note_model(record.why)
        if self.state not in (RequestState.ACCEPTED, RequestState.WAITING):
            self.move(RequestState.WAITING)

    @property
    def fell_back(self) -> bool:
        """Whether another model serves it than it was predicted for."""
        return self.asked.model_rule not in ("", ModelRule.WEIGHTS)

    def note_model(self, why: str) -> None:
        """Note in the decision trace that another model serves it than it asked for."""
        asked = self.asked
        self.steps.append(
            {"model_rule": asked.model_rule, "model": self.call.model, "asked": asked.asked_model, "why": why}
        )

    def degrade(self, decided: port.Admission) -> None:
        """Note that its promise could not be kept when it came: it waits anyway, or in another class."""
        step: dict[str, Any] = {
            "at_door": "late" if decided.slo_class == self.terms.slo_class else "degraded",
            "slo_class": decided.slo_class,
            "wait_p99_s": round(decided.wait_p99_s, 3),
            "late_s": round(decided.late_s, 3),
        }
        if decided.slo_class != self.terms.slo_class:
            self.asked_class = step["asked_class"] = self.terms.slo_class
            self.terms = self.grant.terms[decided.slo_class]
            self.asked = self.asked.on(next(one for one in self.asked.fallbacks if one.slo_class == decided.slo_class))
        self.steps.insert(0, step)

    def note_work(self, ended_s: float, usage: Usage) -> None:
        """Note that its instance worked for it, from its placement to *ended_s*: that is paid, however it ends."""
        self.worked.append((self.instance, self.placed_s, ended_s))
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        elif len(self.worked) == 1:
            self.prompt_tokens = self.asked.prompt_tokens

    def start_over(self) -> None:
        """Leave its instance, with the output that can be continued."""
        self.output_tokens = self.kept_tokens = self.kept.rewind() if self.kept is not None else 0
        if self.kept is None or not self.kept.opened:
            self.first_token_s, self.first_token_heard = 0.0, False
        self.evicting = False

    def evict(self) -> None:
        """Leave the instance, if its output can be continued or there is none."""
        at_instance = self.state in (RequestState.PLACED, RequestState.STREAMING)
        resumable = self.kept.resumable if self.kept is not None else not self.has_shown
        if not at_instance or not resumable or self.evicting:
            return
        self.evicting = True
        if self.leave_instance is not None:
            self.leave_instance()

    def interrupt(self, reason: Interrupt) -> None:
        """Cancel the request's task; it finds the reason in `interrupted`. One that is done waits for its instance's end."""
        open_until = RequestState.FAILED if reason is Interrupt.DISCONNECT else RequestState.DONE
        if self.state < open_until and self.interrupted is None and self.task is not None:
            self.interrupted = reason
            self.task.cancel()

    # What its tenant is told, and pays

    def wait_headers(self) -> list[tuple[bytes, bytes]]:
        """Return headers for the tenant: which other model serves it, and its wait, as estimated on arrival."""
        asked = self.asked
        headers = [(b"x-budget-warning", each.encode("ascii", "replace")) for each in self.budget_warnings]
        if asked.asked_model:
            headers += [(b"x-served-model", self.call.model.encode()), (b"x-model-rule", asked.model_rule.encode())]
        if self.queue_position is None:
            return headers
        headers.append((b"x-queue-position", b"%d" % self.queue_position))
        if self.asked_class:
            headers += [(b"x-slo-class", asked.slo_class.encode()), (b"x-asked-slo-class", self.asked_class.encode())]
        if self.estimated_wait_s is not None:
            headers.append((b"x-estimated-wait-s", b"%.3f" % self.estimated_wait_s))
        return headers

    @property
    def expected_tokens(self) -> int:
        """Return the tokens that count towards limits and budgets until those used are known."""
        if self.call.kind.generates:
            return self.asked.prompt_tokens + int(self.asked.predicted_tokens)
        return self.asked.prompt_tokens if self.call.kind.computes else 0

    @property
    def most_tokens(self) -> int:
        """Return the tokens that it may use; as many as expected, where it does not say how long its answer may be."""
        asked = self.asked
        most = asked.max_tokens if self.call.kind.generates else None
        return self.expected_tokens if most is None else asked.prompt_tokens + most * asked.sequences

    @property
    def has_shown(self) -> bool:
        """Whether its tenant has been sent a token, after which it cannot start over."""
        return self.asked.streamed and self.first_token_s > 0


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
