"""Records between the HTTP side and the decision side, all serializable.

The gateway sends `Asked`, `Open`, `Advanced`, `Finished`, `Left`, `Backlog` and `RunReport`, and for figures
`Arrived`, `Ended` and `RelayFigures`; the dispatcher answers with `Held`, `Queued`, `Rerouted`, `Waiting`, `Admission`,
`Placed`, `Refused`, `Evict` and `Lost`, says with `FellBack` that the fallback of its model serves it,
asks for adapters with `Warm` and for system prompts with `WarmPrefix`, which `PrefixWarmed` answers, and lists the
available models in `ServedModels`. `Forward` has the request asked in another zone, by the `Room` there. Of limits and
budgets, which the first dispatcher counts for all, the gateway sends `Enter`, `Leave` and `LoadWanted`, and is answered
with `Entered`, `NotEntered`, `Load` and `Spent`. A request is identified by its *number*, unique over all relays.
Moments in `_s` are seconds of the machine's monotonic clock, those in `_at` epoch seconds.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from scheduling.queueing.promises import ADMIT, ClassTerms

SILENT = "silent"
"""Failure: the instance does not answer. It gets no other request before its next heartbeat."""
CUT = "cut"
"""Failure: the connection was broken off while the request ran; the server may have died."""
DEAD = "dead"
"""Failure: the engine died, though its server still answers heartbeats."""
ERROR = "error"
"""Failure: the answer was an internal error, or malformed."""
BUSY = "busy"
"""Failure: the instance reported that it takes no more for a while."""
NOT_ALLOWED = "not_allowed"
"""Failure of none: the gateway of the request may not send it to this instance."""
INSTANCES_BUSY = "instances_busy"
"""Refusal code of a request that an instance refused as busy, when no other can take it."""


KV_EVENTS = "kv_events"
"""How it is known what an instance has cached of a prompt: by its KV events,"""
ESTIMATE = "estimate"
"""or by what it was given."""


class Part(Struct, frozen=True, gc=False):
    """A part of records; created in a fifth of the time of a frozen dataclass.

    Without `gc` the collector does not walk it: no record is part of a reference cycle.
    """

    def __repr__(self) -> str:
        """Return the fields without the secret of an instance."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "api_key")
        return f"{type(self).__name__}({', '.join(shown)})"


class Record(Part, frozen=True, gc=False, tag=True, array_like=True):
    """A record, which passes between processes as a list in msgpack, its name first (`controlplane.dispatch.transport`)."""


# From the gateway


class Asked(Record, frozen=True):
    """A request to be queued and placed."""

    number: int
    request_id: str
    model: str
    region: str  # of the caller
    tenant_id: int
    priority: int  # of its SLO class
    due_s: float | None  # of its first token, after its arrival; None: not promised
    arrived_at: float
    arrived_s: float
    prompt_tokens: int  # predicted
    predicted_tokens: float  # output; as the length model returned it, unchecked
    max_tokens: int | None
    sequences: int
    streamed: bool
    prefix_hashes: tuple[int, ...] = ()  # of its leading blocks, where a router uses them
    block_tokens: int = 0
    token_blocks: bytes = b""  # hashes (64 bits) of the full blocks of its prompt's tokens, where they are known
    token_block_size: int = 0  # tokens in each
    system_blocks: int = 0  # of these hashes, those of its system prompt and tools
    deadline_s: float | None = None  # longest hold, after its arrival: of its SLO class
    max_wait_s: float | None = (
        None  # longest wait for an instance, after its arrival, as its caller asks; None: as it is held
    )
    slo_class: str = ""
    interactive: bool = True  # of its SLO class: scaling strategies see only this demand
    opportunistic: bool = False  # of its SLO class: donated instances serve it; else released last, and by no deadline
    ends_on_reclaim: bool = False  # of its SLO class: it is not queued again when a donated instance is reclaimed
    age_s: float = 0.0  # of its work at its arrival: a line of a batch is older than its request
    evictable: bool = False  # its output can be continued; before its first output every request can be evicted
    fingerprint: int = 0  # of its content, the same when it is resent to this process; 0: unknown
    end_s: float | None = None  # of its last token, after its arrival: end to end, or the deadline
    if_unreachable: str = ADMIT  # of its SLO class: `scheduling.queueing.promises`
    fallbacks: tuple[ClassTerms, ...] = ()  # classes to which it may be degraded, in order
    tenant: str = ""
    application: str = ""  # with `run`, the application run that it is a call of; "" for none
    run: str = ""
    unit: str = ""
    adapter: str = ""  # LoRA adapter of the model that it asks for; "" for none
    run_due_s: float | None = None  # of the run's last call, after its first one; None: by the class
    fallback: str = ""  # model that serves it where its own does not (`scheduling.routing.models`); "" for none
    fallback_wait_s: float | None = None  # longest wait for its own; None: however long
    asked_model: str = ""  # name that it asked for, where a rule chose the model that serves it; "" for that model
    model_rule: str = ""  # that rule: `scheduling.routing.models.ModelRule`
    api_key_id: int = 0
    surface: str = ""  # last part of the path that was called
    regions: tuple[str, ...] = ()  # within which its tenant has to be served; (): any
    zones: tuple[str, ...] = ()  # that it has come to, where there are any: the last has it
    own_region: str = ""  # where it counts as demand, in an earlier zone

    @property
    def zone(self) -> str:
        return self.zones[-1] if self.zones else ""

    @property
    def allowed_s(self) -> float:
        """Return seconds from its arrival until its first promise is due, infinity without any."""
        return min(math.inf if self.due_s is None else self.due_s, math.inf if self.end_s is None else self.end_s)

    def on(self, terms: ClassTerms) -> "Asked":
        """Return it as a request on *terms*, to which it was degraded."""
        return replace(self, **{name: getattr(terms, name) for name in TERMS})


TERMS = tuple(name for name in ClassTerms.__struct_fields__ if name in Asked.__struct_fields__)
"""Fields of requests that are terms of their SLO class."""


class Advanced(Record, frozen=True):
    """Progress of many streams: never a record for one token."""

    tokens: tuple[tuple[int, int], ...] = ()
    """(number, output tokens so far) of streams with new tokens."""
    headers: tuple[tuple[int, float], ...] = ()
    """(number, seconds from its placement to the headers of its answer)."""


class Finished(Record, frozen=True):
    """The end of a request that was answered completely."""

    number: int
    output_tokens: int = 0  # of all its sequences


class Left(Record, frozen=True):
    """The departure of a request before its end, or only from its instance (*again*)."""

    number: int
    again: bool = False  # place it again, with its first queue key
    failure: str = ""  # of its instance: SILENT, CUT, DEAD, ERROR, BUSY, NOT_ALLOWED, or ""
    reason: str = ""  # in words
    wait_s: float = 1.0  # until a busy instance takes requests again, as it reported
    evicted: bool = False  # as `Evict` asked
    adapter_failed: bool = False  # its instance could not load its adapter
    kept_tokens: int = 0
    """Output tokens that it keeps: with *again*, the next instance continues there."""


class Open(Record, frozen=True):
    """A request that another dispatcher had: it waits, or runs where it was *placed*. It is not refused for lack of room."""

    asked: Asked
    placed: "Placed | None" = None
    output_tokens: int = 0  # so far, of all its sequences
    kept_tokens: int = 0  # of those, by earlier instances
    attempts: int = 0
    evictions: int = 0
    released: bool = False  # the queue manager held it, and released it

    @property
    def number(self) -> int:
        return self.asked.number


class Arrived(Record, frozen=True):
    """What figures count of a request that came, whether it is asked or refused before."""

    model: str


class Ended(Record, frozen=True):
    """What figures count of a request that ended, wherever it did; it follows `Finished` or `Left`.

    Times are milliseconds since its arrival; None: it got no further.
    """

    model: str  # that served it, as below
    region: str
    instance: str
    slo_class: str
    asked_class: str  # that it was degraded from; "" for none
    outcome: str  # done, failed, cancelled or rejected
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # as its instance reported
    expected_cached_tokens: int | None  # as its router expected
    expected_by: str  # KV_EVENTS or ESTIMATE
    queue_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None  # between tokens
    e2e_ms: float
    held_ms: float  # until the queue manager released it
    slo_met: bool | None  # None: nothing was promised, or its tenant ended it
    objective: float  # share of the requests of its class for which that is promised
    ttft_target_ms: int | None
    at_door: str  # what was decided as its promise was unreachable: late, degraded or refused; "" where it was not
    asked_model: str  # as in `Asked`
    model_rule: str
    adapter: str


class RelayFigures(Record, frozen=True):
    """What a relay reports of itself, again and again."""

    relay: int  # number
    name: str
    host: str
    process_id: int
    started_at: float
    draining: bool  # it takes no more requests
    active: int  # requests between arrival and answer
    streaming: int  # of these, those that get tokens
    busy_ratio: float  # share of its time that its event loop computes
    ledger_held: int  # rows not yet written
    ledger_written: int  # since its start, as the next two
    ledger_given_up: int
    ledger_refused: int  # by the database
    errors: tuple[tuple[int, str, int], ...] = ()  # (status, code, error answers since its start)


class PrefixWarmed(Record, frozen=True):
    """The end of what `WarmPrefix` asked for."""

    instance: str
    ready_at: float
    prefix: int
    failure: str = ""  # in words; "": it is warm


class Enter(Record, frozen=True):
    """A request that begins, to be counted towards limits and budgets: `Entered` or `NotEntered` is the answer."""

    number: int
    tenant_id: int
    key_id: int
    model: str
    tokens: int  # of its prompt and predicted output
    sequences: int  # prompts times `n`
    max_concurrent: int  # sequences of its tenant
    tokens_per_minute: int  # of its tenant; 0: not limited
    rates: bool = True  # whether limits, and budgets by the minute, apply
    application: str = ""  # with `run`, the application run that it is a call of
    run: str = ""
    run_tokens: int = 0  # that it may use: of its prompt, and `max_tokens` or its predicted output
    run_max_tokens: float | None = None  # of the whole run, as this call says; None: it says none
    run_max_usd: float | None = None
    held: bool = False  # the first dispatcher before this one has admitted it: it is counted, and not answered


class Leave(Record, frozen=True):
    """The end of a request that entered, or still waits for that."""

    number: int
    tokens: int  # used
    model: str = ""  # that served it, where that is another than entered


class LoadWanted(Record, frozen=True):
    """Asks for the open sequences of a tenant: `Load` is the answer. *number* is of no request."""

    number: int
    tenant_id: int


class Backlog(Record, frozen=True):
    """Work of *model* that will be submitted as requests of non-interactive classes once there is room."""

    model: str
    due: tuple[tuple[float, int], ...]
    """(deadline in seconds, requests)."""


# From the dispatcher


class Held(Record, frozen=True):
    """The request is held until the queue manager releases it: `Queued` follows."""

    number: int
    region: str  # that its caller prefers
    predicted_tokens: int  # possible output
    why: str
    own_region: str = ""  # as in `Queued`


class Rerouted(Record, frozen=True):
    """The request, which waited in *came_from*, waits for the endpoint of *region* from now on."""

    number: int
    region: str
    predicted_tokens: int  # possible output
    came_from: str
    pressure: float | None  # there


class Queued(Record, frozen=True):
    """The request waits for the endpoint of *region*."""

    number: int
    region: str
    predicted_tokens: int  # possible output
    own_region: str = ""  # where its caller's demand counts; empty where sent before
    released: dict[str, Any] | None = None  # why the queue manager let it go, where it was held: docs/papers/routing.md


class Forward(Record, frozen=True):
    """Another *zone* serves the request better: it is to be asked there, and is not known here any longer."""

    number: int
    zone: str
    own_region: str = ""  # as in `Queued`


class FellBack(Record, frozen=True):
    """The fallback of the request's model serves it from now on, in *region*, under the same number."""

    number: int
    model: str
    region: str
    predicted_tokens: int  # possible output there
    rule: str  # `scheduling.routing.models.ModelRule`
    why: str


class Waiting(Record, frozen=True):
    """The request has to wait: its place in the queue on arrival, and its expected wait."""

    number: int
    position: int  # from 1
    estimated_wait_s: float | None  # mean; None while the pace there is unknown
    estimated_wait_p99_s: float | None


class Admission(Record, frozen=True):
    """The promise of the request's class cannot be kept, so it was admitted late or degraded (`queueing.promises`)."""

    number: int
    slo_class: str  # that it waits in; another than its own: degraded
    late_s: float  # by which it will probably miss the promise of that class; 0: it can keep it
    wait_p99_s: float


class RunRank(Part, frozen=True):
    """The rank of its application run, in seconds of service."""

    rank_s: float
    attained_s: float
    remaining_s: float  # expected
    worst_s: float  # at most, along its path to the end
    first: bool  # moved first by an operator


class Pulled(Part, frozen=True):
    """The request group that an instance took the request from, without asking a router."""

    groups: int  # in the instance's virtual queue
    group: int  # number
    waiting: int  # requests of the group
    due_in_s: float  # its first request


class Reasons(Part, frozen=True, omit_defaults=True):
    """Why an instance was chosen, in numbers. `controlplane.gateway.explanation` puts them into words for a reader."""

    policy: str
    waiting: int  # requests behind it
    prompt_tokens: int
    seen: dict[str, list[float]]  # by instance, in the order of `scheduling.routing.candidates`
    round_trip_ms: float | None = None  # measured, of the chosen one
    cached_tokens: int | None = None  # of the prompt, expected at the chosen one; None: the router weighs no prefixes
    cached_by: str = ""  # how it knew: KV_EVENTS or ESTIMATE
    pulled: Pulled | None = None
    run: RunRank | None = None
    adapter_was: str = ""  # where its adapter was on the chosen one: `scheduling.routing.adapters.TIERS`


class Placed(Record, frozen=True):
    """The request was given to an instance."""

    number: int
    attempt: int  # from 1
    instance: str
    ready_at: float  # start of its service: with its name, identifies this start of its server
    url: str
    api_key: str
    region: str
    ordering: str  # `scheduling.queueing.ordering.ORDERINGS`
    queue_key_s: float  # on the clock of `arrived_at`: instances outlive a gateway
    placed_s: float
    why: Reasons
    first_token_s: float  # time limit of the first token of a stream
    keep_tokens: bool = False  # keep the ids of its output tokens: it may be evicted
    priority: int = 0  # of its class, or as the queue manager released it
    recompute: bool = False  # its prompt is faster computed than restored from CPU memory there
    adapter: str = ""  # LoRA adapter to load there first, unless it is loaded; "" for none
    adapter_source: str = ""  # folder or repository
    unload: tuple[str, ...] = ()  # adapters to unload there
    epoch: int = 0  # of the owner that places it: an older one's is refused


class Warm(Record, frozen=True):
    """Asks to load an adapter at an instance before a request uses it. Its fields are those of `Placed`."""

    instance: str
    ready_at: float
    url: str
    api_key: str
    adapter: str
    adapter_source: str
    unload: tuple[str, ...] = ()
    again: bool = False  # it is loaded, and is to come onto the GPU


class WarmPrefix(Record, frozen=True):
    """Asks to compute a system prompt at an instance before a request uses it: `PrefixWarmed` is the answer."""

    instance: str
    ready_at: float
    url: str
    api_key: str
    prefix: int  # hash of its last whole block


class Refused(Record, frozen=True):
    """The request will not be served."""

    number: int
    status: int  # of HTTP: 400, 404, 409, 422, 429, 500, 502, 503, 504
    code: str
    message: str
    retry_after_s: float | None  # None: a retry makes no sense
    estimated_wait_s: float | None = None
    region: str = ""  # of the endpoint that refused; empty if it was none
    own_region: str = ""  # as in `Queued`
    earliest_at: float | None = None  # first token that can be promised, where a deadline is unreachable


class Evict(Record, frozen=True):
    """Asks for a request back from its instance, with its output so far: `Left` is the answer.

    There is no answer if it ends first, or has begun to emit what cannot be continued.
    """

    number: int


class Lost(Record, frozen=True):
    """The request's instance was given up, or is another one by now. It may have left that instance meanwhile."""

    number: int
    attempt: int  # of the `Placed` that it is about
    reclaimed: bool = False  # a donated instance was reclaimed, and the request ends
    stopped: bool = False  # an operator has stopped its application run, and the request ends


class Entered(Record, frozen=True):
    """The request is within its limits and budgets."""

    number: int
    warnings: tuple[str, ...] = ()  # budgets above their soft limit, for a header


class NotEntered(Record, frozen=True):
    """The request exceeds a limit or a budget; nothing of it is counted."""

    number: int
    status: int  # of HTTP
    code: str
    message: str
    retry_after_s: float | None  # None: a retry makes no sense
    kind: str = ""  # `type` in OpenAI's error body; "": by the status
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Load(Record, frozen=True):
    number: int
    sequences: int  # queued or running, of all relays


class Spent(Record, frozen=True):
    """All budgets of dollars that are spent, once a second and when that changes. To all relays."""

    scopes: tuple[tuple[int | None, int | None, str], ...]
    """(tenant, key, model); None, "": of all."""


class Tokenizer(Part, frozen=True):
    """Where prompts are tokenized, for an index of blocks of *block_size* tokens."""

    model: str
    block_size: int
    url: str
    api_key: str
    prefill_s_per_token: float = 0.0  # time that a cached token saves; 0: not known


class ServedModel(Part, frozen=True):
    name: str
    context_tokens: int
    created_at: int
    has_endpoint: bool  # it is or was served somewhere
    by_prefix: bool  # some router considers the start of prompts, and system prompts may be warmed
    task: str = "generate"  # `scheduling.model_task.Task`
    base: str = ""  # of a LoRA adapter: the model that it adapts
    fallback: str = ""  # model that serves its requests where it does not; "" for none
    fallback_wait_s: float | None = None  # longest wait for it before that; None: however long
    tokenizer: Tokenizer | None = None  # `Asked.token_blocks` are wanted; None: they are not
    tenant_id: int = 0  # of an adapter that is this tenant's alone; 0: of all
    shard: str = "shard 1"  # role of its owner, without a zone


class Room(Record, frozen=True):
    """What the sender serves in each of its roles: how many more requests of a model it takes there before they wait."""

    roles: dict[str, dict[str, int]]


class WeightedTargets(Part, frozen=True):
    """A public name whose requests are shared among models and adapters by weight."""

    name: str
    created_at: int
    weights: dict[str, float]


class ServedModels(Record, frozen=True):
    """All models that may be requested from now on."""

    models: tuple[ServedModel, ...]
    targets: tuple[WeightedTargets, ...] = ()


class RunReport(Record, frozen=True):
    """A report of a tenant about a run: it was opened or closed, or a unit that is no LLM began or ended. Or of an operator
    that stopped it."""

    what: Literal["opened", "began", "ended", "closed", "stopped"]
    tenant_id: int
    application: str
    run: str
    execution: int = 0  # of the unit
    unit: str = ""
    duration_s: float | None = None  # of a unit that ended; None: it failed
    due_s: float | None = None  # of a run that was opened, after now
    ago_s: float = 0.0  # since when a unit has run that a process hears of later, as after a restart
    backend: str = ""  # of the unit


# Between the processes of both sides


class Hello(Record, frozen=True):
    """A relay begins a session with an owner: what it had open there is void, and follows as `Open`."""

    relay: int  # number; its requests' numbers begin with it
    session: int
    machine: str  # of which `clock_s` is the clock
    clock_s: float


class Welcome(Record, frozen=True):
    """The owner takes part in the session: records follow in both directions."""

    session: int
    machine: str
    clock_s: float
    owns: dict[str, int]
    """Epoch of each role that it owns."""
    relays: tuple[int, ...] = ()
    """Numbers of all that take part."""


class Registered(Record, frozen=True):
    """The relay has sent all that it has open of a shard to its new owner."""

    relay: int  # number
    shard: str  # role
    relays: tuple[int, ...]  # that took part with the last owner, as far as this one knows


class Bye(Record, frozen=True):
    """Something was lost, or the sender is no owner any longer: a new session is needed."""

    session: int


ForAllowances = Enter | Leave | LoadWanted
OfAllowances = Entered | NotEntered | Load | Spent
ForFigures = Arrived | Ended | RelayFigures
ForQueues = Asked | Open | Advanced | Finished | Left | Backlog | PrefixWarmed | RunReport
FromGateway = ForQueues | ForAllowances | ForFigures | Registered
OfRequest = Held | Queued | Rerouted | Forward | FellBack | Waiting | Admission | Placed | Refused | Evict | Lost
FromDispatcher = OfRequest | ServedModels | Room | Warm | WarmPrefix | OfAllowances
FIRST = "shard 1"
"""Role of the owner of the first shard of models, and of what is the whole fleet's."""
RELAY_BITS = 36
"""A request's number is its relay's, shifted by so many bits, plus its own there."""


def relay_of(number: int) -> int:
    """Return the number of the relay that carries request *number*."""
    return number >> RELAY_BITS


Send = Callable[[FromGateway], None]
Deliver = Callable[[FromDispatcher], None]
