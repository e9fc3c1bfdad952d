"""The life of a request on the decision side: admitted, queued, placed, retried or moved, and ended.

The dispatcher holds the queue: an instance is given a request only while it has room, so the order can still change, plus
the few that start there within a dispatch round trip (`scheduling.routing.requests_ahead`). Its features are stages
(`controlplane.dispatch.stages`). All calls happen on the event loop, so no lock is needed; every decision is one compiled
call on the arrays that the simulator also uses.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Concatenate, ParamSpec

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch import port
from controlplane.dispatch.adapters import Adapters
from controlplane.dispatch.fallbacks import Fallbacks
from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.holding import HeldEstimate, HeldRequests
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.inventory import Inventory
from controlplane.dispatch.live_fleet.request_table import LiveRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Estimate, Replica, Request, Topology
from controlplane.dispatch.observation import Demand
from controlplane.dispatch.outcomes import Outcomes
from controlplane.dispatch.placement import Placement, none_serves
from controlplane.dispatch.prewarming import Prewarming
from controlplane.dispatch.promises import Promises
from controlplane.dispatch.prompt_blocks import PromptBlocks
from controlplane.dispatch.reordering import Ask, Reordering
from controlplane.dispatch.runs import ApplicationRuns, run_stopped
from controlplane.dispatch.spot import Spot
from controlplane.dispatch.stages import MAX_ATTEMPTS, Arrival, Retry, Stage, hooks
from controlplane.dispatch.suspects import Suspects
from controlplane.dispatch.sweeping import Sweeping
from controlplane.dispatch.token_accounts import Outlook, TokenAccounts
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.dispatch.waits import Waits
from scheduling.queueing.held_work import Release

P = ParamSpec("P")
logger = logging.getLogger(__name__)


class Dispatcher:
    """Takes the gateway's records with `take`, and answers through *deliver*; *ask* has a worker order the queues."""

    def __init__(
        self, topology: Topology, clock: Callable[[], float], *, deliver: port.Deliver, ask: Ask | None = None
    ) -> None:
        self.topology = topology
        self.deliver = deliver
        self.clock = clock
        self._requests: dict[int, Request] = {}  # by number
        self._by_prefix = topology.by_prefix  # as of the last change
        self.queue = WaitingQueue(topology, clock)
        self.accounts = TokenAccounts(topology)
        self.blocks = PromptBlocks(topology, self.queue)
        self.placement = Placement(topology, self.queue, self.accounts, self.blocks, clock, deliver)
        self.suspects = Suspects(topology, clock)
        self.outcomes = Outcomes(topology, self.queue, clock, self.suspects.died)
        self.waits = Waits(topology, self.queue, clock)
        self.runs = ApplicationRuns(topology, self.queue, self._produced, self.placement.pump)
        self.prewarming = Prewarming(topology, self.queue, self.runs, clock, deliver)
        self.adapters = Adapters(topology)
        self.spot = Spot(self, self.queue)
        self.fallbacks = Fallbacks(self, self.queue, self.placement, self.waits)
        self.reordering = Reordering(topology, self.queue, self.placement, clock, self.evict, ask)
        self.table = LiveRequests()
        self.fleet = LiveFleet(
            topology,
            self.queue,
            self.table,
            enqueue=self.guarded(self._enqueue),
            expire=self.guarded(self._expire),
            spot_with_room=self.spot.with_room,
        )
        self.holding = HeldRequests(self.fleet, deliver)
        acting = self.queue, self.placement, self.waits, self.holding
        self.sweeping = Sweeping(self, *acting, self.fallbacks)
        self.stages: tuple[Stage, ...] = (
            self.outcomes,
            self.runs,
            self.suspects,
            Demand(clock),
            self.prewarming,
            self.spot,
            self.holding,
            self.waits,
            self.fallbacks,
            self.adapters,
            Promises(self, *acting),
            self.blocks,
            self.accounts,
            self.reordering,
            self.queue,
            self.sweeping,
        )
        self.connect()

    def connect(self) -> None:
        """Have every hook call the stages that have it."""
        self._admit, self._candidates = hooks(self.stages, "admit"), hooks(self.stages, "candidates")
        self._queued, self._waiting = hooks(self.stages, "queued"), hooks(self.stages, "waiting")
        self._progress, self._failed = hooks(self.stages, "progress"), hooks(self.stages, "failed")
        self._again, self._withdrawn = hooks(self.stages, "again"), hooks(self.stages, "withdrawn")
        self._ended = hooks(self.stages, "ended")
        self.placement.placed = hooks(self.stages, "placed")
        self.sweep_steps = hooks(self.stages, "sweep")
        """The parts of `sweep`, in order: each leaves everything such that requests can be served before the next."""

    def take(self, record: port.FromGateway) -> None:
        """Act on a record of the gateway; decisions are delivered before this returns, or later."""
        match record:
            case port.Advanced():
                self._on_progress(record)
            case port.Asked():
                self._submit(record)
            case port.Finished():
                self._on_finished(record)
            case port.Left():
                self._on_left(record)
            case port.Prefix():
                self._on_prefix(record)
            case port.PrefixWarmed():
                self.prewarming.warmed(record)
            case port.Backlog():
                self.holding.work.expect(record.model, record.due)

    def apply_inventory(self, inventory: Inventory) -> None:
        """Update the live fleet from *inventory*, and list the models that may be requested."""
        topology = self.topology
        for replica in topology.apply(inventory):
            self.lose(replica)
        with_endpoint = {endpoint.model for endpoint in topology.endpoints}
        models = (
            port.ServedModel(
                name,
                model.context_tokens,
                model.created_at,
                name in with_endpoint,
                name in topology.by_prefix,
                model.task,
                fallback=model.fallback,
                fallback_wait_s=model.fallback_wait_s,
                tokenizer=self.blocks.tokenizer(name),
            )
            for name, model in topology.models.items()
        )
        lora = {
            endpoint.model for endpoint in topology.endpoints if endpoint.spec.max_loras and topology.serves(endpoint)
        }
        adapters = (
            port.ServedModel(
                one.name, base.context_tokens, one.created_at, one.base in lora, one.base in topology.by_prefix, base.task,
                base=one.base, tokenizer=self.blocks.tokenizer(one.base), tenant_id=one.tenant_id,
            )
            for one in topology.adapters.values()
            if (base := topology.models.get(one.base)) is not None
        )  # fmt: skip
        self.deliver(port.ServedModels((*models, *adapters), topology.targets))

    def pump_all(self) -> None:
        """Give out every request that has room. Call after any change of the topology."""
        if self.topology.by_prefix != self._by_prefix:
            self._want_prefixes(self.topology.by_prefix - self._by_prefix)
            self._by_prefix = self.topology.by_prefix
        self.placement.pump_all()

    def sweep(self) -> None:
        """Reorder, move or refuse requests that wait in vain. Call every `SWEEP_S`."""
        for step in self.sweep_steps:
            step()

    def guarded(self, act: Callable[Concatenate[Request, P], object]) -> Callable[Concatenate[Request, P], None]:
        """Return *act*, whose error ends that request only: a sweep continues with the rest."""

        def guarded(request: Request, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                act(request, *args, **kwargs)
            except Exception:
                logger.exception("dispatcher: request %s ends with an error", request.asked.request_id)
                if self.is_open(request):
                    message = "The request could not be queued because of an internal error."
                    self.refuse(request, 500, "internal_error", message, 5)

        return guarded

    def _expire(self, request: Request) -> None:
        self.sweeping.expire(request)

    # Admit

    def _submit(self, asked: port.Asked) -> None:
        """Queue *asked* at its endpoint and give out what has room.

        Refused with 503 if nothing serves its model or soon will, with 429 if the queue is full.
        """
        preferred = self.topology.candidates(asked.model, asked.region)
        own = self.topology.endpoints[int(preferred[0])] if preferred.size else None
        own_region = own.spec.region if own is not None else ""
        arrival = Arrival(asked, own, self.placement.choose_endpoint(self.candidates(asked)))
        refusal = self._refusal(arrival)
        asked, endpoint = arrival.asked, arrival.endpoint
        if refusal is not None or endpoint is None:
            self.deliver(replace(refusal or none_serves(asked), own_region=own_region))
            return
        adapter = self.topology.adapter_number(asked.adapter)
        request = Request(asked, self.possible(asked), endpoint, own_region=own_region, adapter=adapter)
        self._requests[asked.number] = request
        self.table.open(request)
        if arrival.held:
            self.holding.hold(request)
        else:
            self._enqueue(request, endpoint)

    def _refusal(self, arrival: Arrival) -> port.Refused | None:
        for admit in self._admit:
            refusal: port.Refused | None = admit(arrival)
            if refusal is not None:
                return refusal
        return None if arrival.held or arrival.endpoint is None else self._full(arrival.asked, arrival.endpoint)

    def candidates(self, asked: port.Asked) -> NDArray[np.int32]:
        """Return the endpoints that may serve *asked*, in order of preference."""
        endpoints = self.topology.candidates(asked.model, asked.region, asked.opportunistic)
        for candidates in self._candidates:
            endpoints = candidates(asked, endpoints)
        return endpoints

    def _full(self, asked: port.Asked, endpoint: Endpoint) -> port.Refused | None:
        """Return the refusal of *asked* where the queue of *endpoint* is full."""
        count = self.queue.count(endpoint)
        if not endpoint.spec.policy.is_full(count):
            return None
        wait_s = self.estimated_wait_s(endpoint)
        return port.Refused(
            asked.number,
            429,
            "queue_full",
            f"The queue for {endpoint.model!r} in {endpoint.region} is full ({count} requests)."
            + ("" if wait_s is None else f" The wait is about {wait_s:.0f} s."),
            retry_after_s=max(1.0, wait_s / 2) if wait_s is not None else 5.0,
            estimated_wait_s=wait_s,
            region=endpoint.region,
        )

    def possible(self, asked: port.Asked) -> int:
        """Return the predicted output of *asked*, capped at the possible output; the cap if the prediction is not a number.

        Every bound on a wait rests on this: a length model may return anything.
        """
        model = self.topology.models.get(asked.model)
        most = asked.max_tokens
        if model:
            room = model.context_tokens - asked.prompt_tokens
            # A prompt estimated to fill the whole context says nothing about its answer: vLLM counts it, or refuses it.
            most = room if room > 0 else model.context_tokens
        if most and asked.max_tokens:
            most = min(most, asked.max_tokens)
        predicted = float(asked.predicted_tokens)
        if most is None:
            return int(max(predicted, 1)) if math.isfinite(predicted) else 1
        most *= asked.sequences
        return int(min(max(predicted, 1), most)) if math.isfinite(predicted) else most

    # Queue

    def _enqueue(self, request: Request, endpoint: Endpoint) -> None:
        request.endpoint = endpoint
        for queued in self._queued:
            queued(request)
        self.queue.add(request, endpoint)
        number, own_region, request.own_region = request.asked.number, request.own_region, ""
        release, request.release = request.release, None
        self.deliver(
            port.Queued(
                number,
                endpoint.spec.region,
                request.predicted_tokens,
                own_region=own_region,
                released=None if release is None else _released(release, request.asked.priority),
            )
        )
        self.placement.pump(endpoint)
        if request.slot >= 0:
            for waiting in self._waiting:
                if waiting(request):
                    break

    def _place_again(self, request: Request, *, busy: bool = False) -> None:
        """Queue *request* again after its instance failed it or it was evicted, with its first queue key.

        Instances that have not failed it are preferred. Refused after too many attempts (502), when nothing serves the model
        any longer (503), or when it was refused as *busy* and nothing else can take it.
        """
        asked = request.asked
        failed = request.attempts - request.evictions - request.failed_before
        retry = Retry(failed, self._takes(request, request.failed_at), [*request.failed_at])
        for again in self._again:
            if (refusal := again(request, retry)) is not None:
                self.drop(request, refusal)
                return
        if request.asked is not asked:  # a stage queued it for another model
            return
        if busy and (failed >= MAX_ATTEMPTS or not retry.elsewhere):
            message = f"Every instance of {asked.model!r} that could take the request is busy."
            self.refuse(request, 503, port.INSTANCES_BUSY, message, 1)
            return
        if failed >= MAX_ATTEMPTS:
            message = f"The request was tried on {failed} instances, and each failed before it answered."
            self.refuse(request, 502, "upstream_failed", message, 5)
            return
        request.output_tokens, request.evicting_s = 0, None
        avoid = retry.avoid if self._takes(request, retry.avoid) else request.failed_at if retry.elsewhere else ()
        with self.topology.without(avoid):
            endpoint = self.placement.choose_endpoint(self.candidates(asked))
            if endpoint is None:
                self.drop(request, none_serves(asked))
                return
            self._enqueue(request, endpoint)
        if request.slot >= 0:  # no other instance has room
            self.placement.pump(endpoint)

    def _takes(self, request: Request, without: Collection[Replica]) -> bool:
        """Whether an instance of the model of *request* that is not among *without* accepts work."""
        accepting, model = self.topology.fleet.accepting, request.asked.model
        return any(
            one.spec.model == model and accepting[one.slot] and one not in without
            for one in self.topology.replicas.values()
        )

    # Progress and ends

    def _on_progress(self, progress: port.Advanced) -> None:
        requests = self._requests
        for number, took_s in progress.headers:
            if (request := requests.get(number)) is not None:
                self.outcomes.headers(request, took_s)
        tokens = [(requests[number], tokens) for number, tokens in progress.tokens if number in requests]
        for move in self._progress:
            move(tokens)

    def _on_finished(self, finished: port.Finished) -> None:
        request = self._requests.get(finished.number)
        if request is not None:
            if request.replica is not None:
                self.queue.settle(request, finished.output_tokens - request.kept_tokens)
            self._end(request, finished.output_tokens)

    def _on_left(self, left: port.Left) -> None:
        """End a request, or only take it off its instance, and count that instance's failure."""
        request = self._requests.get(left.number)
        if request is None:
            if left.again:  # the gateway waits for it to be placed
                message = "The request is not known to the dispatcher any longer."
                self.deliver(port.Refused(left.number, 503, "model_unavailable", message, retry_after_s=1))
            return
        if request.replica is not None:
            for failed in self._failed:
                failed(request, request.replica, left)
            self.queue.settle(request, request.output_tokens)
        if not left.again:
            self._end(request)
            return
        self._withdraw(request)
        request.evictions += left.evicted
        _keep(request, left.kept_tokens)
        self.table.write(request)
        self._place_again(request, busy=left.failure == port.BUSY)

    def _end(self, request: Request, output_tokens: int | None = None) -> None:
        """Forget *request*, wherever it is: every request leaves here. Without *output_tokens* it was not answered."""
        for ended in self._ended:
            ended(request, output_tokens)
        self._withdraw(request)
        del self._requests[request.asked.number]
        self.table.close(request)

    def _withdraw(self, request: Request) -> None:
        """Take *request* out of its queue, off its instance or from the queue manager, and give its room to others."""
        replica = request.replica
        for withdrawn in self._withdrawn:
            withdrawn(request)
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        if replica is not None:
            if replica.health.breaker is not Breaker.CLOSED:
                self.topology.settle(replica)
            self.placement.pump(replica.endpoint)

    def refuse(self, request: Request, status: int, code: str, message: str, retry_after_s: float) -> None:
        self.drop(request, port.Refused(request.asked.number, status, code, message, retry_after_s=retry_after_s))

    def drop(self, request: Request, refused: port.Refused) -> None:
        """End *request*, and deliver why."""
        self._end(request)
        self.deliver(refused)

    def evict(self, number: int) -> int | None:
        """Evict request *number*, which waits again with its output so far; return the tokens to recompute.

        Return None, and do nothing, if it has no instance or has emitted what cannot be continued. The output of an
        answer that is not streamed is unknown here, and is lost.
        """
        request = self._requests.get(number)
        if request is None or request.replica is None:
            return None
        kept = request.asked.evictable and (request.endpoint.is_spot or self.queue.grouped(request.endpoint))
        if request.output_tokens and not kept:
            return None
        request.evicting_s = self.clock()
        self.deliver(port.Evict(number))
        return request.asked.prompt_tokens + request.output_tokens

    def lose(self, replica: Replica) -> None:
        """Give up *replica*; the gateway decides what to do for each of its requests."""
        for request in list(replica.requests):
            self.deliver(port.Lost(request.asked.number))

    def stop_run(self, application: tuple[int, str], run: str) -> None:
        """End all open calls of a run, and refuse later ones."""
        self.runs.stop(application, run)
        for request in self.calls_of(application, run):
            if request.replica is None:
                self.drop(request, run_stopped(request.asked))
            else:
                self.deliver(port.Lost(request.asked.number, stopped=True))

    # Prefixes

    def _want_prefixes(self, models: frozenset[str]) -> None:
        """Request prefixes of waiting requests for *models*, whose router did not need them on arrival."""
        for request in list(self._requests.values()):
            if request.asked.model in models and request.slot >= 0 and not request.asked.prefix_hashes:
                self.deliver(port.PrefixWanted(request.asked.number))

    def _on_prefix(self, prefix: port.Prefix) -> None:
        request = self._requests.get(prefix.number)
        if request is not None:
            request.asked = replace(request.asked, prefix_hashes=prefix.hashes, block_tokens=prefix.block_tokens)
            if request.slot >= 0:
                self.queue.note_prefix(request)

    # Reading

    def is_open(self, request: Request) -> bool:
        return request.asked.number in self._requests

    def _produced(self, number: int) -> int:
        """Return the output tokens so far of request *number*; 0 if no instance has it."""
        request = self._requests.get(number)
        return request.output_tokens if request is not None and request.replica is not None else 0

    def calls_of(self, application: tuple[int, str], run: str) -> list[Request]:
        """Return the open calls of a run."""
        return [
            each
            for each in self._requests.values()
            if each.asked.run == run and (each.asked.tenant_id, each.asked.application) == application
        ]

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Return the mean wait of a request that joins the queue of *endpoint* last; None while unknown."""
        wait = self.waits.of_next(endpoint)
        return None if wait is None else wait.mean_s

    def waiting_now(self, most: int) -> Iterator[tuple[Request, Estimate]]:
        """Yield the first *most* waiting requests of each endpoint in order, with their remaining waits as of when they are
        yielded; none that has left by then."""
        for requests in [self.queue.first(each, most) for each in self.topology.endpoints]:
            yield from ((request, self.waits.of(request)) for request in requests if request.slot >= 0)

    def held_now(self, most: int) -> list[HeldEstimate]:
        """Return the first *most* requests of each model that the queue manager holds, in order."""
        return self.holding.estimates(most)

    def oldest_wait_s(self, endpoint: Endpoint) -> float:
        return self.clock() - min((one.asked.arrived_s for one in self.queue.of(endpoint)), default=self.clock())

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """Return the outlook of *endpoint* from its look-ahead maps and the prompts that wait for it."""
        return self.accounts.outlook(endpoint, self.queue.prompt_tokens(endpoint))


def _released(release: Release, priority: int) -> dict[str, object]:
    """Return *release* as the gateway records it, with the *priority* that the request has now."""
    use = None if math.isinf(release.use) else round(release.use, 4)
    return {"why": release.why, "use": use, "held_s": round(release.held_s, 3), "priority": priority}


def _keep(request: Request, kept_tokens: int) -> None:
    """Make the kept output of *request* part of its prompt for the next instance."""
    asked, more = request.asked, kept_tokens - request.kept_tokens
    most = None if asked.max_tokens is None else max(1, asked.max_tokens - more)
    request.asked = replace(asked, prompt_tokens=asked.prompt_tokens + more, max_tokens=most)
    request.predicted_tokens = max(1, request.predicted_tokens - more)
    request.kept_tokens = kept_tokens
