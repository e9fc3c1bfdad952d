"""Records between the HTTP side and the decision side, each of which can be serialised.

The gateway sends `Submit`, `Progress`, `Prefix`, `Finished` and `Left`; the dispatcher answers with `Moved`, `Waiting`,
`Placed`, `PrefixWanted`, `Refused`, `Evict` and `Lost`, and lists what may be asked for in `ServedModels`. A request is
known by its *number*, which is unique within the gateway that submits it. Moments in `_s` are seconds of the machine's
monotonic clock, those in `_at` epoch seconds.
"""

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct

SILENT = "silent"
"""How an instance failed a request: it does not answer. It is given no other before its next heartbeat."""
CUT = "cut"
"""It broke the connection off while the request ran: its server may have ended."""
DEAD = "dead"
"""Its engine died, though its server still answers heartbeats."""
ERROR = "error"
"""It answered with an internal error, or with nonsense."""
BUSY = "busy"
"""It takes no more for a while, by its own word."""
INSTANCES_BUSY = "instances_busy"
"""Code of the refusal of a request that an instance refused as busy, when no other one can take it."""


class Record(Struct, frozen=True, gc=False):
    """A record; made in a fifth of the time of a frozen dataclass, written as JSON or msgpack by msgspec.

    Without `gc` the collector does not walk it: no record is part of a cycle of references.
    """


# From the gateway


class Submit(Record, frozen=True):
    """A request to be queued and placed."""

    number: int
    request_id: str
    model: str
    region: str  # of the caller
    tenant_id: int
    priority: int  # of its SLO class
    due_s: float | None  # after its arrival, of its first token; None: that is not promised
    arrived_at: float
    arrived_s: float
    prompt_tokens: int  # predicted
    predicted_tokens: float  # output; as the length model said, whatever that is
    max_tokens: int | None
    sequences: int
    streamed: bool
    prefix_hashes: tuple[int, ...] = ()  # of its leading blocks, where a router goes by them
    block_tokens: int = 0
    deadline_s: float | None = None  # of its SLO class, after its arrival: it is held so long
    slo_class: str = ""
    interactive: bool = True  # its SLO class is: of demand, scaling strategies see this alone
    evictable: bool = False  # what it has emitted can be continued; before that every request can be evicted
    fingerprint: int = 0  # of what was sent, the same when this process is sent it again; 0: not known
    end_s: float | None = None  # after its arrival, of its last token: end to end, or the deadline

    @property
    def allowed_s(self) -> float:
        """Seconds from its arrival after which the first of what it was promised is due, infinity for nothing."""
        return min((each for each in (self.due_s, self.end_s) if each is not None), default=math.inf)


class Progress(Record, frozen=True):
    """Progress of many streams: never a record for one token."""

    tokens: tuple[tuple[int, int], ...] = ()
    """(number, output tokens so far) of those with new tokens."""
    headers: tuple[tuple[int, float], ...] = ()
    """(number, seconds from its placement to the headers of its answer)."""


class Prefix(Record, frozen=True):
    """Prefix hashes of a request whose `Submit` had none."""

    number: int
    hashes: tuple[int, ...]  # of its leading blocks
    block_tokens: int


class Finished(Record, frozen=True):
    """It was answered completely, and leaves."""

    number: int
    output_tokens: int = 0  # of all its sequences


class Left(Record, frozen=True):
    """It leaves before its end, or only the instance that it was given to (*again*)."""

    number: int
    again: bool = False  # place it once more, with its first queue key
    failure: str = ""  # of its instance: SILENT, CUT, DEAD, ERROR, BUSY, or nothing
    reason: str = ""  # in words
    wait_s: float = 1.0  # of a busy instance: until it may take requests again, as it said
    evicted: bool = False  # as `Evict` asked
    kept_tokens: int = 0
    """Output tokens that it keeps: with *again*, the next instance continues there."""


# From the dispatcher


class Moved(Record, frozen=True):
    """It waits for the endpoint of *region* now."""

    number: int
    region: str
    predicted_tokens: int  # output: what may come
    came_from: str = ""  # the region in which it waited before
    pressure: float | None = None  # there
    own_region: str = ""  # where its caller's demand counts; empty where it was said before


class Waiting(Record, frozen=True):
    """No instance had room when it came: its place in the queue then, and how long it is expected to wait there."""

    number: int
    position: int  # 1: the next to be given out
    estimated_wait_s: float | None  # mean; None while nothing is known of the pace there
    estimated_wait_p99_s: float | None


class Placed(Record, frozen=True):
    """It was given to an instance."""

    number: int
    attempt: int  # from 1
    instance: str
    ready_at: float  # since when it serves: with its name, which start of its server this is
    url: str
    api_key: str
    region: str
    ordering: str  # `scheduling.queueing.ordering.ORDERINGS`
    queue_key_s: float  # as it was queued, on the clock of `arrived_at`: instances outlive a gateway
    placed_s: float
    why: dict[str, Any]  # docs/routing.md
    first_token_s: float  # how long the first token of a stream may take
    keep_tokens: bool = False  # keep the ids of what it emits: it may be evicted

    def __repr__(self) -> str:
        """Without its secret."""
        return (
            f"Placed(number={self.number}, attempt={self.attempt}, instance={self.instance!r}, region={self.region!r})"
        )


class PrefixWanted(Record, frozen=True):
    """It waits, and its router now needs its prefix: `Prefix` is the answer."""

    number: int


class Refused(Record, frozen=True):
    """It will not be served."""

    number: int
    status: int  # of HTTP: 422, 429, 502, 503
    code: str
    message: str
    retry_after_s: float | None  # None: trying again makes no sense
    estimated_wait_s: float | None = None
    region: str = ""  # of the endpoint that did; empty if it was none
    own_region: str = ""  # as in `Moved`


class Evict(Record, frozen=True):
    """It is to leave its instance and come back to the queue, with what it has emitted: `Left` is the answer.

    None comes if it ends first, or has begun to emit what cannot be continued.
    """

    number: int


class Lost(Record, frozen=True):
    """Its instance was given up, or is another one now."""

    number: int


class ServedModel(Record, frozen=True):
    name: str
    context_tokens: int
    created_at: int
    has_endpoint: bool  # it is served somewhere, or was
    by_prefix: bool  # some router goes by how its prompts begin: `Submit.prefix_hashes` is wanted


class ServedModels(Record, frozen=True):
    """All models that may be asked for from now on."""

    models: tuple[ServedModel, ...]


FromGateway = Submit | Progress | Prefix | Finished | Left
OfRequest = Moved | Waiting | Placed | PrefixWanted | Refused | Evict | Lost
FromDispatcher = OfRequest | ServedModels
Send = Callable[[FromGateway], None]
Deliver = Callable[[FromDispatcher], None]
