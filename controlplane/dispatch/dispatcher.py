"""The decision side of a request's life: what the gateway's records set going, and what is asked of the queue.

We hold the queue; an instance is given a request only while it has room, so order stays ours to change, and the few
beyond that which begin there within a dispatch round trip (`scheduling.routing.requests_ahead`). All calls happen on the
event loop, so no lock is needed; every decision is one compiled call on the same arrays that the simulator uses.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from controlplane.dispatch.kernels import note_end
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.inventory import Inventory
from controlplane.dispatch.live_fleet.lookahead import Anticipation, Outlook
from controlplane.dispatch.live_fleet.topology import Ended, Endpoint, Replica, Topology
from controlplane.dispatch.port import (
    BUSY,
    CUT,
    DEAD,
    ERROR,
    INSTANCES_BUSY,
    SILENT,
    Deliver,
    Evict,
    Finished,
    FromGateway,
    Left,
    Lost,
    Moved,
    Prefix,
    PrefixWanted,
    Progress,
    Refused,
    ServedModel,
    ServedModels,
    Submit,
    Waiting,
)
from controlplane.dispatch.requests.placement import Placement
from controlplane.dispatch.requests.rehoming import Rehoming
from controlplane.dispatch.requests.reordering import Reordering
from controlplane.dispatch.requests.request import Estimate, Request
from controlplane.dispatch.requests.suspects import Suspects
from controlplane.dispatch.requests.token_accounts import TokenAccounts
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from controlplane.dispatch.requests.waiting_times import WaitingTimes

MAX_ATTEMPTS = 3


class Dispatcher:
    """*deliver* takes the decisions about requests; `take` takes the records that ask for them."""

    def __init__(self, topology: Topology, clock: Callable[[], float], *, deliver: Deliver) -> None:
        self.topology = topology
        topology.on_lost = self._lost
        topology.on_death = self._ended
        topology.on_look = lambda replica, began_s, ended: self.suspects.looked(replica, began_s, ended=ended)
        self.deliver = deliver
        self.clock = clock
        self.on_submit: Callable[[Submit], None] = lambda asked: None
        self.began_s = self.swept_s = clock()
        self._requests: dict[int, Request] = {}  # by number
        self._by_prefix = topology.by_prefix  # as of the last change
        self.anticipation = Anticipation(topology.fleet.endpoint.size)
        self.queue = WaitingQueue(topology, self.began_s, clock)
        self.accounts = TokenAccounts(topology, self.anticipation)
        self.suspects = Suspects(topology, clock, self._place_again)
        self.times = WaitingTimes(topology, self.queue)
        self.placement = Placement(topology, self.queue, self.anticipation, self.accounts, self.times, clock, deliver)
        self.reordering = Reordering(topology, self.queue, self.placement, clock, evict=self.evict)
        self.rehoming = Rehoming(
            topology,
            self.queue,
            self.placement,
            refuse=self._refuse,
            deliver=deliver,
        )

    def take(self, record: FromGateway) -> None:
        """Do what the gateway says; what comes of it is delivered before this returns, or later."""
        match record:
            case Progress():
                self._progress(record)
            case Submit():
                self._submit(record)
            case Finished():
                self._finished(record)
            case Left():
                self._left(record)
            case Prefix():
                self._prefix(record)

    def apply_inventory(self, inventory: Inventory) -> None:
        """Make the live fleet agree with *inventory*, and list the models that may be asked for."""
        topology = self.topology
        topology.apply(inventory)
        with_endpoint = {endpoint.model for endpoint in topology.endpoints}
        models = (
            ServedModel(name, model.context_tokens, model.created_at, name in with_endpoint, name in topology.by_prefix)
            for name, model in topology.models.items()
        )
        self.deliver(ServedModels(tuple(models)))

    def pump_all(self) -> None:
        """Give out what can be given out, after any change of the topology: there may be room."""
        if self.topology.by_prefix != self._by_prefix:
            self._want_prefixes(self.topology.by_prefix - self._by_prefix)
            self._by_prefix = self.topology.by_prefix
        self.placement.pump_all()

    def sweep(self) -> None:
        """Move or refuse what waits in vain. Call it once a second."""
        self.swept_s = self.clock()
        self.topology.end_rests(self.swept_s)
        self.suspects.sweep()
        self.reordering.look()
        self.queue.keep_order()
        self.rehoming.sweep(self.clock())

    # What happens to a request

    def _submit(self, asked: Submit) -> None:
        """Queue what was *asked* where it belongs and give out what can be given out.

        Refused with 503 if nothing serves its model or soon will, with 429 if the queue there is full.
        """
        self.on_submit(asked)
        endpoint = self.placement.choose_endpoint(asked.model, asked.region)
        own_region = self.topology.own_region(asked.model, asked.region)
        if (refusal := self.suspects.refusal(asked)) is not None:
            self.deliver(refusal)
        elif endpoint is None:
            self.deliver(_none_serves(asked, own_region))
        elif endpoint.spec.policy.is_full(self.queue.count(endpoint)):
            self.deliver(self._full(asked, endpoint, own_region))
        else:
            request = Request(asked, self._possible(asked), endpoint, own_region=own_region)
            self._requests[asked.number] = request
            if self.suspects.is_suspect(asked):
                self.suspects.wait_for_trial(request)
            else:
                self._enqueue(request, endpoint)

    def _enqueue(self, request: Request, endpoint: Endpoint) -> None:
        self.queue.add(request, endpoint)
        number, predicted_tokens = request.asked.number, request.predicted_tokens
        own_region, request.own_region = request.own_region, ""
        self.deliver(Moved(number, endpoint.region, predicted_tokens, own_region=own_region))
        self.placement.pump(endpoint)
        if request.slot >= 0:
            self.times.note(request, self.clock())
            if not request.attempts:
                self._estimate(request)

    def _estimate(self, request: Request) -> None:
        """Say where in its queue *request* is, for which no instance had room, and what it is expected to wait."""
        estimate = request.estimate = self.times.estimate(request, self.clock())
        number, position, wait = request.asked.number, estimate.position, estimate.wait
        mean_s, p99_s = (wait.mean_s, wait.quantile_s()) if wait else (None, None)
        self.deliver(Waiting(number, position, mean_s, p99_s))

    def _possible(self, asked: Submit) -> int:
        """The output predicted of what was *asked*, but no more than may come, and all of that if it is no number at all.

        Every bound on a wait rests on this: a length model may say anything.
        """
        model = self.topology.models.get(asked.model)
        most = asked.max_tokens
        if model:
            room = model.context_tokens - asked.prompt_tokens
            # A prompt that we guess to fill the whole context says nothing of its answer: vLLM counts it, or refuses it.
            most = room if room > 0 else model.context_tokens
        if most and asked.max_tokens:
            most = min(most, asked.max_tokens)
        predicted = float(asked.predicted_tokens)
        if most is None:
            return int(max(predicted, 1)) if math.isfinite(predicted) else 1
        most *= asked.sequences
        return int(min(max(predicted, 1), most)) if math.isfinite(predicted) else most

    def _full(self, asked: Submit, endpoint: Endpoint, own_region: str) -> Refused:
        wait_s = self.estimated_wait_s(endpoint)
        return Refused(
            asked.number,
            429,
            "queue_full",
            f"The queue for {endpoint.model!r} in {endpoint.region} is full ({self.queue.count(endpoint)} requests)."
            + ("" if wait_s is None else f" The wait is about {wait_s:.0f} s."),
            retry_after_s=max(1.0, wait_s / 2) if wait_s is not None else 5.0,
            estimated_wait_s=wait_s,
            region=endpoint.region,
            own_region=own_region,
        )

    def _progress(self, progress: Progress) -> None:
        """Count in the arrays how far streaming requests have come."""
        fleet, now_s, requests = self.topology.fleet, self.clock(), self._requests
        for number, took_s in progress.headers:
            if (request := requests.get(number)) is not None and request.replica is not None:
                request.replica.health.heard(now_s)
                request.replica.round_trip.headers_came(fleet, request.replica.slot, took_s, now_s)
        came = [(requests[number], tokens) for number, tokens in progress.tokens if number in requests]
        for request, _ in came:
            if request.replica is not None:
                request.replica.health.heard(now_s, served=True)
                if self.suspects.trying:
                    self.suspects.tried(request, cleared=False)
        self.accounts.advance((request, tokens - request.kept_tokens) for request, tokens in came)

    def _finished(self, finished: Finished) -> None:
        """Note length and pace, by which waits are estimated and requests given ahead, and let the request go."""
        request = self._requests.pop(finished.number, None)
        if request is None:
            return
        self.times.finished(request, finished.output_tokens)
        self.suspects.tried(request, cleared=True)
        replica = request.replica
        if replica is not None:
            now_s = self.clock()
            self.topology.note_success(replica, now_s)
            for failed, why in request.unproved:
                self.topology.note_failure(failed, why, now_s)
            replica.ended.append(Ended(request.placed_s, now_s, request.asked.prompt_tokens, finished.output_tokens))
            replica.endpoint.finished_s.append(now_s)
            replica.round_trip.request_ended(now_s - request.placed_s)
            note_end(self.topology.fleet, replica.slot, now_s - self.began_s)
        self._leave(request)

    def _left(self, left: Left) -> None:
        """Let a request go, or only from its instance; note how that failed it."""
        request = self._requests.get(left.number)
        if request is None:
            return
        replica = request.replica
        if replica is not None:
            self._note_failure(request, replica, left)
        cut = replica is not None and left.failure == CUT
        held = replica is not None and cut and self.suspects.was_cut(request, replica, left.again)
        self._leave(request)
        if left.again:
            request.evictions += left.evicted
            _keep(request, left.kept_tokens)
            if not held:
                self._place_again(request, busy=left.failure == BUSY)
        else:
            self.suspects.gone(request)
            del self._requests[left.number]

    def _note_failure(self, request: Request, replica: Replica, left: Left) -> None:
        """Note how *replica* failed *request*; nothing if it is to leave for another reason."""
        topology, now_s = self.topology, self.clock()
        if not left.failure:
            return
        request.failed_at.append(replica)
        if left.failure in (SILENT, CUT):
            replica.reachable = False  # until its next heartbeat
            topology.doubt(replica)
        elif left.failure == DEAD and not replica.lost:
            replica.lost = "its engine died"
            self._ended(replica)
        if left.failure == BUSY:
            topology.note_busy(replica, left.reason, now_s, left.wait_s)
        elif left.failure == ERROR and left.again:  # of the instance or of the request: another instance shows it
            request.unproved.append((replica, left.reason))
        else:
            topology.note_failure(replica, left.reason, now_s)

    def _ended(self, replica: Replica) -> None:
        """The engine of *replica* ended under what runs there."""
        self.suspects.died(replica, [each.asked.fingerprint for each in replica.requests])

    def _want_prefixes(self, models: frozenset[str]) -> None:
        """Ask how the prompts of waiting requests for *models* begin: when they came, no router went by that."""
        for request in list(self._requests.values()):
            if request.asked.model in models and request.slot >= 0 and not request.asked.prefix_hashes:
                self.deliver(PrefixWanted(request.asked.number))

    def _prefix(self, prefix: Prefix) -> None:
        request = self._requests.get(prefix.number)
        if request is not None:
            request.asked = replace(request.asked, prefix_hashes=prefix.hashes, block_tokens=prefix.block_tokens)
            if request.slot >= 0:
                self.queue.note_prefix(request)

    def _leave(self, request: Request) -> None:
        """Take *request* out of wherever it is (queue or instance) and let others have its room."""
        replica = self.accounts.close(request)
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        if replica is not None:
            if replica.health.breaker is not Breaker.CLOSED:
                self.topology.settle(replica)
            self.placement.pump(replica.endpoint)

    def _place_again(self, request: Request, *, busy: bool = False) -> None:
        """Queue *request* again after its instance failed it or it was evicted, with its first queue key.

        It goes to an instance that has not failed it while there is one. Refused after too many attempts (502), when
        nothing serves the model any more (503), or when it was refused as *busy* and nothing else can take it.
        """
        asked = request.asked
        failed = request.attempts - request.evictions
        if (refusal := self.suspects.refusal(asked)) is not None:
            self._refuse(request, refusal)
            return
        if self.suspects.is_suspect(asked) and not self.suspects.tries(request):
            self.suspects.wait_for_trial(request)
            return
        elsewhere = self._takes_elsewhere(request)
        if busy and (failed >= MAX_ATTEMPTS or not elsewhere):
            self._refuse(
                request,
                Refused(
                    asked.number,
                    503,
                    INSTANCES_BUSY,
                    f"Every instance of {asked.model!r} that could take the request is busy.",
                    retry_after_s=1,
                ),
            )
            return
        if failed >= MAX_ATTEMPTS:
            self._refuse(
                request,
                Refused(
                    asked.number,
                    502,
                    "upstream_failed",
                    f"The request was tried on {failed} instances, and each failed before it answered.",
                    retry_after_s=5,
                ),
            )
            return
        request.output_tokens, request.evicting_s = 0, None
        with self.topology.without(request.failed_at if elsewhere else ()):
            endpoint = self.placement.choose_endpoint(asked.model, asked.region)
            if endpoint is None:
                self._refuse(request, _none_serves(asked))
                return
            self._enqueue(request, endpoint)
        if request.slot >= 0:  # no other has room now
            self.placement.pump(endpoint)

    def _takes_elsewhere(self, request: Request) -> bool:
        """Whether an instance of its model that has not failed *request* accepts work."""
        accepting, model = self.topology.fleet.accepting, request.asked.model
        return any(
            one.spec.model == model and accepting[one.slot] and one not in request.failed_at
            for one in self.topology.replicas.values()
        )

    def _refuse(self, request: Request, refused: Refused) -> None:
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        self.suspects.gone(request)
        del self._requests[request.asked.number]
        self.deliver(refused)

    def _lost(self, replica: Replica) -> None:
        """*replica* was given up: the gateway knows of each of its requests what to do."""
        for request in list(replica.requests):
            self.deliver(Lost(request.asked.number))

    # What is asked of it

    def evict(self, number: int) -> int | None:
        """Have request *number* leave its instance and wait again, what it emitted kept: tokens to compute again for that.

        None, and nothing happens, if it has no instance, or has emitted what cannot be continued. What an answer that is not
        streamed has is not known here, and is lost.
        """
        request = self._requests.get(number)
        if request is None or request.replica is None:
            return None
        kept = request.asked.evictable and self.queue.grouped(request.endpoint)
        if request.output_tokens and not kept:
            return None
        request.evicting_s = self.clock()
        self.deliver(Evict(number))
        return request.asked.prompt_tokens + request.output_tokens

    @property
    def waiting_count(self) -> int:
        return len(self.queue)

    def waiting_at(self, endpoint: Endpoint) -> int:
        """Requests held for *endpoint*."""
        return self.queue.count(endpoint)

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Time until a request that joins the queue of *endpoint* last is given out; None while nothing is known of it."""
        wait = self.times.of_next(endpoint, self.clock())
        return None if wait is None else wait.mean_s

    def waiting_now(self, most: int) -> list[tuple[Request, Estimate]]:
        """Requests that wait, the first *most* of each endpoint in order, with what each is expected to wait from now on."""
        now_s = self.clock()
        return [
            row
            for endpoint in self.topology.endpoints
            if self.queue.count(endpoint)
            for row in self.times.of_all(endpoint, now_s, most)
        ]

    def oldest_wait_s(self, endpoint: Endpoint) -> float:
        now_s = self.clock()
        return max((now_s - request.asked.arrived_s for request in self.queue.of(endpoint)), default=0.0)

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """What the look-ahead maps of *endpoint* say, counting what is held for it."""
        slots = [replica.slot for replica in self.topology.members(endpoint)]
        return self.anticipation.look(self.topology.fleet, slots, self.queue.prompt_tokens(endpoint))


def _keep(request: Request, kept_tokens: int) -> None:
    """The next instance of *request* is to compute as its prompt the output that is kept, and has so much less to come."""
    asked, more = request.asked, kept_tokens - request.kept_tokens
    most = None if asked.max_tokens is None else max(1, asked.max_tokens - more)
    request.asked = replace(asked, prompt_tokens=asked.prompt_tokens + more, max_tokens=most)
    request.predicted_tokens = max(1, request.predicted_tokens - more)
    request.kept_tokens = kept_tokens


def _none_serves(asked: Submit, own_region: str = "") -> Refused:
    return Refused(
        asked.number,
        503,
        "model_unavailable",
        f"No instance of {asked.model!r} is serving or being started.",
        retry_after_s=15,
        own_region=own_region,
    )
