"""The life of a request on the decision side, in four verbs: it is admitted, queued, placed, and ends.

Whatever else happens to requests is a stage (`controlplane.dispatch.stages`), whose hooks are each called in one place here.
The dispatcher holds the queue: an instance is given a request only while it has room, so the order can still change, plus
the few that start there within a dispatch round trip (`scheduling.routing.requests_ahead`). All calls happen on the event
loop, so no lock is needed; every decision is one compiled call on the arrays that the simulator also uses.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Concatenate, ParamSpec

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch import port
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.request_table import LiveRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.placement import Placement
from controlplane.dispatch.prompt_blocks import PromptBlocks
from controlplane.dispatch.stages import HOOKS, MAX_ATTEMPTS, Arrival, Retry, Stage
from controlplane.dispatch.token_accounts import TokenAccounts
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.queueing.held_work import Release

P = ParamSpec("P")
logger = logging.getLogger(__name__)


class Core:
    """Requests from their arrival to their end. *deliver* gets the decisions."""

    def __init__(self, topology: Topology, clock: Callable[[], float], deliver: port.Deliver) -> None:
        self.topology, self.clock, self.deliver = topology, clock, deliver
        self.requests: dict[int, Request] = {}
        """Open requests by number."""
        self.elsewhere: Callable[[str, tuple[str, ...], bool, tuple[str, ...]], str | None] = lambda *asked: None
        """Returns another zone for a request of a model that came to these, only one with room or any: `Dispatchers`."""
        self.table = LiveRequests()
        self.queue = WaitingQueue(topology, clock)
        self.accounts = TokenAccounts(topology)
        self.blocks = PromptBlocks(topology, self.queue)
        self.placement = Placement(topology, self.queue, self.accounts, self.blocks, clock, deliver)
        self.run_stages(())

    def run_stages(self, stages: Sequence[Stage]) -> None:
        """Have every hook call those of *stages* that have it, in their order."""
        self.stages = tuple(stages)
        self.hooks = {
            name: tuple(getattr(one, name) for one in stages if getattr(type(one), name) is not getattr(Stage, name))
            for name in HOOKS
        }
        self.placement.placed = self.hooks["placed"]

    # Admit

    def admit(self, asked: port.Asked, *, again: bool = False) -> None:
        """Queue *asked* at its endpoint and give out what has room; *again*: another dispatcher had admitted it.

        Refused with 503 if nothing serves its model or soon will, with 429 if the queue is full.
        """
        asked = self.topology.within(asked)
        preferred = self.topology.candidates(asked.model, asked.region, within=asked.regions)
        own = self.topology.endpoints[int(preferred[0])] if preferred.size else None
        own_region = asked.own_region or (own.spec.region if own is not None else "")
        arrival = Arrival(asked, own, self.placement.choose_endpoint(self.candidates(asked)), again=again)
        if (zone := self.better_zone(asked, arrival.endpoint)) is not None:
            if own is not None and not (again or asked.own_region):
                own.count_demand(asked, self.clock())
            self.deliver(port.Forward(asked.number, zone, own_region))
            return
        refusal = self._refusal(arrival)
        asked, endpoint = arrival.asked, arrival.endpoint
        if refusal is not None or endpoint is None:
            self.deliver(replace(refusal or self.none_serves(asked), own_region=own_region))
            return
        adapter = self.topology.adapter_number(asked.adapter)
        request = Request(asked, self.possible(asked), endpoint, own_region=own_region, adapter=adapter, again=again)
        self.requests[asked.number] = request
        self.table.open(request)
        if arrival.hold is not None:
            arrival.hold(request)
        else:
            self.enqueue(request, endpoint)

    def reopen(self, opened: port.Open) -> None:
        """Take up a request that another dispatcher had: where it runs, or in its order among what waits."""
        asked, placed = self.topology.within(opened.asked), opened.placed
        if placed is None and not (opened.attempts or opened.released):
            self.admit(asked, again=True)
            return
        replica = None if placed is None else self.topology.serving(placed.instance, placed.url)
        endpoint = self.placement.choose_endpoint(self.candidates(asked)) if replica is None else replica.endpoint
        if endpoint is None:
            zone = self.better_zone(asked, None)
            self.deliver(self.none_serves(asked) if zone is None else port.Forward(asked.number, zone))
            return
        request = Request(asked, self.possible(asked), endpoint, adapter=self.topology.adapter_number(asked.adapter))
        request.again, request.attempts, request.evictions = True, opened.attempts, opened.evictions
        request.released_s = self.clock() if opened.released else None
        self.requests[asked.number] = request
        self.table.open(request)
        if opened.kept_tokens:
            _keep(request, opened.kept_tokens)
            self.table.write(request)
        if placed is None:
            self.enqueue(request, endpoint)
        elif replica is None:
            self.deliver(port.Lost(asked.number, request.attempts))
        else:
            for queued in self.hooks["queued"]:
                queued(request)
            self.queue.add(request, endpoint)
            self.placement.give(request, replica, placed)
            self.advance([(asked.number, opened.output_tokens)])

    def forget(self, requests: Sequence[Request]) -> None:
        """End *requests* without a word: their relay has gone, or another dispatcher has them."""
        for request in sorted(requests, key=lambda each: each.replica is not None):  # else some of them would be placed
            self.end(request)

    def _refusal(self, arrival: Arrival) -> port.Refused | None:
        for admit in self.hooks["admit"]:
            refusal: port.Refused | None = admit(arrival)
            if refusal is not None:
                return refusal
        if arrival.hold or arrival.endpoint is None or arrival.again:
            return None
        return self._full(arrival.asked, arrival.endpoint)

    def candidates(self, asked: port.Asked) -> NDArray[np.int32]:
        """Return the endpoints that may serve *asked*, in order of preference."""
        endpoints = self.topology.candidates(asked.model, asked.region, asked.opportunistic, asked.regions)
        for candidates in self.hooks["candidates"]:
            endpoints = candidates(asked, endpoints)
        return endpoints

    def none_serves(self, asked: port.Asked) -> port.Refused:
        """Return the refusal of *asked*, which nothing serves: for good where only regions other than its tenant's do."""
        others = () if self.topology.zones else self.topology.candidates(asked.model, asked.region)
        if len(others) and not self.topology.candidates(asked.model, asked.region, within=asked.regions).size:
            where = (
                f"{asked.model!r} is served in no region that this tenant's data may be in: {', '.join(asked.regions)}."
            )
            return port.Refused(asked.number, 400, "not_served_in_regions", where, retry_after_s=None)
        where = f" in {', '.join(asked.regions)}" if asked.regions else ""
        text = f"No instance of {asked.model!r} is serving or being started{where}."
        return port.Refused(asked.number, 503, "model_unavailable", text, retry_after_s=15)

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

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Return the mean wait of a request that joins the queue of *endpoint* last; None while unknown."""
        return None

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

    def enqueue(self, request: Request, endpoint: Endpoint) -> None:
        """Queue *request* at *endpoint*, and give out what has room there."""
        request.endpoint = endpoint
        for queued in self.hooks["queued"]:
            queued(request)
        self.queue.add(request, endpoint)
        number, own_region, request.own_region = request.asked.number, request.own_region, ""
        release, request.release = request.release, None
        released = None if release is None else _released(release, request.asked.priority)
        region, predicted = endpoint.spec.region, request.predicted_tokens
        self.deliver(port.Queued(number, region, predicted, own_region=own_region, released=released))
        self.placement.pump(endpoint)
        if request.slot >= 0:
            for waiting in self.hooks["waiting"]:
                if waiting(request):
                    break

    def place_again(self, request: Request, *, busy: bool = False) -> None:
        """Queue *request* again after its instance failed it or it was evicted, with its first queue key.

        Instances that have not failed it are preferred. Refused after too many attempts (502), when nothing serves the model
        any longer (503), or when it was refused as *busy* and nothing else can take it.
        """
        asked = request.asked
        failed = request.attempts - request.evictions - request.failed_before
        retry = Retry(failed, self._takes(request, request.failed_at), [*request.failed_at])
        for again in self.hooks["again"]:
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
                if not self.forward(request):
                    self.drop(request, self.none_serves(asked))
                return
            self.enqueue(request, endpoint)
        if request.slot >= 0:  # no other instance has room
            self.placement.pump(endpoint)

    def _takes(self, request: Request, without: Collection[Replica]) -> bool:
        """Whether an instance of the model of *request* that is not among *without* accepts work."""
        accepting, model = self.topology.fleet.accepting, request.asked.model
        return any(
            one.spec.model == model and accepting[one.slot] and one not in without
            for one in self.topology.replicas.values()
        )

    def evict(self, number: int) -> int | None:
        """Evict request *number*, which waits again with its output so far; return the tokens to recompute.

        Return None, and do nothing, if it has no instance or has emitted what cannot be continued. The output of an
        answer that is not streamed is unknown here, and is lost.
        """
        request = self.requests.get(number)
        if request is None or request.replica is None:
            return None
        kept = request.asked.evictable and (request.endpoint.is_spot or self.queue.grouped(request.endpoint))
        if request.output_tokens and not kept:
            return None
        request.evicting_s = self.clock()
        self.deliver(port.Evict(number))
        return request.asked.prompt_tokens + request.output_tokens

    # Progress

    def advance(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Count the output tokens so far of requests, (number, tokens)."""
        requests = self.requests
        known = [(requests[number], count) for number, count in tokens if number in requests]
        if not known:
            return
        for progress in self.hooks["progress"]:
            progress(known)

    # End

    def finish(self, request: Request, output_tokens: int) -> None:
        """End *request*, which was answered completely."""
        if request.replica is not None:
            self.queue.settle(request, output_tokens - request.kept_tokens)
        self.end(request, output_tokens)

    def leave(self, request: Request, left: port.Left) -> None:
        """End *request*, or only take it off its instance, and count that instance's failure."""
        if request.replica is not None:
            for failed in self.hooks["failed"]:
                failed(request, request.replica, left)
            self.queue.settle(request, request.output_tokens)
        if not left.again:
            self.end(request)
            return
        self._withdraw(request)
        request.evictions += left.evicted
        _keep(request, left.kept_tokens)
        self.table.write(request)
        self.place_again(request, busy=left.failure in (port.BUSY, port.NOT_ALLOWED))

    def end(self, request: Request, output_tokens: int | None = None) -> None:
        """Forget *request*, wherever it is: every request leaves here. Without *output_tokens* it was not answered."""
        for ended in self.hooks["ended"]:
            ended(request, output_tokens)
        self._withdraw(request)
        del self.requests[request.asked.number]
        self.table.close(request)

    def _withdraw(self, request: Request) -> None:
        """Take *request* out of its queue, off its instance or from the queue manager, and give its room to others."""
        replica = request.replica
        for withdrawn in self.hooks["withdrawn"]:
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
        self.end(request)
        self.deliver(refused)

    def better_zone(self, asked: port.Asked, endpoint: Endpoint | None) -> str | None:
        """Return the zone to forward *asked* to; None: it stays.

        It leaves where nothing serves it, and for a zone with room where it would leave the region of *endpoint*, the best
        one here.
        """
        if not self.topology.zones:
            return None
        if endpoint is None or self.topology.is_dark(endpoint.region):
            return self.elsewhere(asked.model, asked.zones, False, asked.regions)
        if self.placement.slack(endpoint) > 0:
            return None
        return self.elsewhere(asked.model, asked.zones, True, asked.regions)

    def forward(self, request: Request) -> bool:
        """Forward *request*, which no instance has, to a zone that serves it better; return whether there is one."""
        asked = request.asked
        zone = self.better_zone(asked, self.placement.choose_endpoint(self.candidates(asked)))
        if zone is not None:
            self.end(request)
            self.deliver(port.Forward(asked.number, zone))
        return zone is not None

    def is_open(self, request: Request) -> bool:
        return request.asked.number in self.requests

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
