"""The life of a request on the decision side: queued, placed, retried or moved, and released.

The dispatcher holds the queue: an instance is given a request only while it has room, so the order can still change, plus
the few that start there within a dispatch round trip (`scheduling.routing.requests_ahead`). All calls happen on the event
loop, so no lock is needed; every decision is one compiled call on the arrays that the simulator also uses.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace as dataclass_replace
from typing import Concatenate, ParamSpec

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from controlplane.dispatch import port
from controlplane.dispatch.holding import HeldEstimate, Holding
from controlplane.dispatch.kernels import drop_adapter, note_end
from controlplane.dispatch.live_fleet.health import Breaker
from controlplane.dispatch.live_fleet.inventory import Inventory
from controlplane.dispatch.live_fleet.topology import Endpoint, Estimate, Replica, Request, Topology
from controlplane.dispatch.placement import Placement
from controlplane.dispatch.prewarming import Prewarming
from controlplane.dispatch.reordering import Ask, Reordering
from controlplane.dispatch.runs import ApplicationRuns
from controlplane.dispatch.suspects import Suspects
from controlplane.dispatch.token_accounts import Outlook, TokenAccounts
from controlplane.dispatch.waiting_queue import WaitingQueue, first_due_of
from controlplane.dispatch.waits import Waits
from scheduling.queueing.ordering import hold_s
from scheduling.queueing.promises import ClassTerms, Verdict, decide
from scheduling.queueing.waits.waiting_time import Wait
from scheduling.routing.models import ModelRule, fallback_rule
from scheduling.routing.regions import SWEEP_S, better_home, pressure

P = ParamSpec("P")
logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
RETRY_S = 30.0
"""`Retry-After` of a request that was held too long, where its wait is not known."""
WHY_FALLBACK = {
    ModelRule.UNAVAILABLE: "no instance of that takes it now",
    ModelRule.WAIT: "it would have waited too long for that",
    ModelRule.FAILURE: "that failed it before its first token",
}


class Dispatcher:
    """Takes the gateway's records with `take`, and answers through *deliver*; *ask* has a worker order the queues."""

    def __init__(
        self, topology: Topology, clock: Callable[[], float], *, deliver: port.Deliver, ask: Ask | None = None
    ) -> None:
        self.topology = topology
        self.deliver = deliver
        self.clock = clock
        self.swept_s = clock()
        self._requests: dict[int, Request] = {}  # by number
        self._by_prefix = topology.by_prefix  # as of the last change
        self.queue = WaitingQueue(topology, clock)
        self.accounts = TokenAccounts(topology)
        self.suspects = Suspects(topology, clock)
        self.waits = Waits(topology, self.queue, clock)
        self.runs = ApplicationRuns(topology, self.queue, self._produced)
        self.prewarming = Prewarming(topology, self.queue, self.runs, clock, deliver)
        self.placement = Placement(topology, self.queue, self.accounts, self.waits, clock, deliver, self.prewarming)
        self.reordering = Reordering(topology, self.queue, self.placement, clock, ask)
        self.holding = Holding(
            topology,
            self.queue,
            clock,
            spot_with_room=self.placement.spot_with_room,
            enqueue=self._guarded(self._enqueue),
            expire=self._guarded(self._expire),
            deliver=deliver,
        )

    def take(self, record: port.FromGateway) -> None:
        """Act on a record of the gateway; decisions are delivered before this returns, or later."""
        match record:
            case port.Progress():
                self._progress(record)
            case port.Submit():
                self._submit(record)
            case port.Finished():
                self._finished(record)
            case port.Left():
                self._left(record)
            case port.Prefix():
                self._prefix(record)
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
                tokenizer=self._tokenizer(name),
            )
            for name, model in topology.models.items()
        )
        lora = {
            endpoint.model for endpoint in topology.endpoints if endpoint.spec.max_loras and topology.serves(endpoint)
        }
        adapters = (
            port.ServedModel(
                one.name, base.context_tokens, one.created_at, one.base in lora, one.base in topology.by_prefix, base.task,
                base=one.base, tokenizer=self._tokenizer(one.base), tenant_id=one.tenant_id,
            )
            for one in topology.adapters.values()
            if (base := topology.models.get(one.base)) is not None
        )  # fmt: skip
        self.deliver(port.ServedModels((*models, *adapters), topology.targets))

    def _tokenizer(self, model: str) -> port.Tokenizer | None:
        """Return the least busy instance of *model* whose cache is known by its KV events, if there is another to choose."""
        fleet, sizes = self.topology.fleet, self.queue.affinity.blocks.block_tokens
        if not sizes.any():
            return None
        known = [
            one
            for one in self.topology.replicas.values()
            if one.spec.model == model and one.slot < sizes.size and sizes[one.slot] and fleet.accepting[one.slot]
        ]
        if len(known) < 2:
            return None
        least = min(known, key=lambda one: (fleet.running[one.slot], one.slot))
        saves_s = least.spec.profile.prefill_b_s_per_token if least.spec.profile else 0.0
        return port.Tokenizer(model, int(sizes[least.slot]), least.spec.url, least.spec.api_key, saves_s)

    def pump_all(self) -> None:
        """Give out every request that has room. Call after any change of the topology."""
        if self.topology.by_prefix != self._by_prefix:
            self._want_prefixes(self.topology.by_prefix - self._by_prefix)
            self._by_prefix = self.topology.by_prefix
        self.placement.pump_all()

    def sweep(self) -> None:
        """Reorder, move or refuse requests that wait in vain. Call every `SWEEP_S`."""
        for step in self.sweep_steps():
            step()

    def sweep_steps(self) -> tuple[Callable[[], None], ...]:
        """Return the parts of `sweep`, in order: each leaves everything such that requests can be served before the next."""
        return (
            self._end_rests,
            self.rank_runs,
            self.prewarm,
            self.reorder,
            self.queue.keep_order,
            self.sweep_queues,
        )

    def _end_rests(self) -> None:
        self.swept_s = self.clock()
        self.topology.end_rests(self.swept_s)

    def rank_runs(self) -> None:
        """Refresh the ranks of application runs that wait."""
        for endpoint in self.runs.look():
            self.placement.pump(endpoint)

    def prewarm(self) -> None:
        """Warm what waiting requests and likely calls will need."""
        self.prewarming.look()

    def prewarm_on(self) -> None:
        """Note what further runs will probably call. Call ten times a second."""
        self.prewarming.look_on()

    def _produced(self, number: int) -> int:
        """Return the output tokens so far of request *number*; 0 if no instance has it."""
        request = self._requests.get(number)
        return request.output_tokens if request is not None and request.replica is not None else 0

    def reorder(self) -> None:
        """Reorder the queues, and evict requests that make a group late."""
        for number in self.reordering.look():
            self.evict(number)

    def sweep_queues(self) -> None:
        """Refuse requests held too long, and move those that are better off elsewhere."""
        check, now_s = self._guarded(self._check_hold), self.clock()
        # Those of donated instances come last, in the order of their models and regions, not as they were first needed.
        for endpoint in sorted(self.topology.endpoints, key=lambda one: (one.is_spot, (one.base or one).index)):
            self._follow_start(endpoint)
            for request in self._waiting_in_order(endpoint):
                check(request)
            self.rehome(endpoint, now_s)
        for request in self.holding.of_unserved():
            check(request)

    def _waiting_in_order(self, endpoint: Endpoint) -> Iterator[Request]:
        """Yield what waits for *endpoint*, without what has left or moved before it is yielded."""
        for request in self.queue.in_order(endpoint):
            if request.slot >= 0 and request.endpoint is endpoint:
                yield request

    def _check_hold(self, request: Request) -> None:
        """Refuse *request*, which waits, if it waits in vain or too long, or queue it for the fallback of its model."""
        asked = request.asked
        if request.replica is not None or asked.number not in self._requests:
            return
        if request.slot < 0 and not self.topology.candidates(asked.model, asked.region).size:
            self._drop(request, _none_serves(asked))
        elif request.adapter >= 0 and not request.has_begun and not self.topology.serves_adapters(request.endpoint):
            self._drop(request, _no_adapters(asked))
        elif request.slot < 0 or not self._waits_too_long(request, self.clock() - asked.arrived_s):
            self._give_up_late(request)

    def _follow_start(self, endpoint: Endpoint) -> None:
        """Note when an instance of *endpoint*, which none served, has come up: holds start again there."""
        starting = self.waits.start_left_s(endpoint) is not None
        if endpoint.starting and not starting and self.waits.paces.serving(endpoint):
            endpoint.up_s = self.clock()
        endpoint.starting = starting

    def _expire(self, request: Request) -> None:
        """Refuse *request*, which the queue manager held, or have it held on."""
        if not self._give_up_late(request):
            self.holding.hold_until(request, self.clock() + SWEEP_S)

    def _guarded(self, act: Callable[Concatenate[Request, P], object]) -> Callable[Concatenate[Request, P], None]:
        """Return *act*, whose error ends that request only: a sweep continues with the rest."""

        def guarded(request: Request, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                act(request, *args, **kwargs)
            except Exception:
                logger.exception("dispatcher: request %s ends with an error", request.asked.request_id)
                if request.asked.number in self._requests:
                    message = "The request could not be queued because of an internal error."
                    self._refuse(request, 500, "internal_error", message, 5)

        return guarded

    # Instances

    def lose(self, replica: Replica) -> None:
        """Give up *replica*; the gateway decides what to do for each of its requests."""
        for request in list(replica.requests):
            self.deliver(port.Lost(request.asked.number))

    def died(self, replica: Replica) -> None:
        """Record that the engine of *replica* died under its requests. Call before `lose`."""
        self.suspects.died(replica)

    # Requests

    def _submit(self, asked: port.Submit) -> None:
        """Queue *asked* at its endpoint and give out what has room.

        Refused with 503 if nothing serves its model or soon will, with 429 if the queue is full.
        """
        if self.runs.is_stopped(asked):
            self.deliver(_run_stopped(asked))
            return
        self.prewarming.come(asked)
        candidates, own_region = self.topology.candidates(asked.model, asked.region), ""
        if candidates.size:
            preferred = self.topology.endpoints[int(candidates[0])]
            preferred.count_demand(asked, self.clock())
            own_region = preferred.spec.region
        spot = self.placement.spot_with_room(asked) if asked.opportunistic else None
        endpoint = spot or self.placement.choose_endpoint(self._candidates(asked))
        refusal, adapter = self.suspects.refusal(asked), self.topology.adapter_number(asked.adapter)
        if asked.fallback and spot is None and refusal is None and not self.holding.holds(asked):
            full = endpoint is not None and endpoint.spec.policy.is_full(self.waiting(endpoint))
            if (fallback := self._fallback(asked, full=full)) is not None:
                asked, endpoint = self._fall_back(asked, *fallback)
                endpoint.count_demand(asked, self.clock())
        if refusal is not None:
            self.deliver(refusal)
        elif spot is None and self.holding.holds(asked) and candidates.size:
            preferred = self.topology.endpoints[int(candidates[0])]
            request = Request(asked, self._possible(asked), preferred, own_region=own_region, adapter=adapter)
            self._requests[asked.number] = request
            self.holding.hold(request)
        elif asked.adapter and candidates.size and (endpoint is None or not self.topology.serves_adapters(endpoint)):
            self.deliver(_no_adapters(asked, own_region))
        elif endpoint is None:
            self.deliver(_none_serves(asked, own_region))
        elif endpoint.spec.policy.is_full(self.waiting(endpoint)):
            self.deliver(self._full(asked, endpoint, own_region))
        else:
            request = Request(asked, self._possible(asked), endpoint, own_region=own_region, adapter=adapter)
            self._requests[asked.number] = request
            self._enqueue(request, endpoint)

    def _fallback(
        self, asked: port.Submit, wait_s: float = 0.0, *, full: bool = False
    ) -> tuple[Endpoint, ModelRule] | None:
        """Return the endpoint of the fallback of *asked* and the rule by which that serves it; None while it does not.

        *wait_s*: what it waits for its own model; *full*: whether the queue there is.
        """
        there = (
            self.placement.serving(self.topology.candidates(asked.fallback, asked.region)) if asked.fallback else None
        )
        if there is None or there.spec.policy.is_full(self.queue.count(there)):
            return None
        wait = self.waits.of_next(there)
        rule = fallback_rule(
            serves=not full and self.placement.serving(self._candidates(asked)) is not None,
            wait_s=wait_s,
            most_wait_s=asked.fallback_wait_s,
            there_s=wait.mean_s if wait is not None else 0.0,  # no request waits there yet, or its pace is not known
        )
        return None if rule is None else (there, rule)

    def _fall_back(self, asked: port.Submit, there: Endpoint, rule: ModelRule) -> tuple[port.Submit, Endpoint]:
        """Notify the gateway that *there* serves *asked* by *rule*; return it as a request of that model, and *there*."""
        words = f"Served by {there.model}, the fallback of {asked.model}: {WHY_FALLBACK[rule]}."
        asked = replace(
            asked,
            model=there.model,
            fallback="",
            prefix_hashes=(),
            token_blocks=b"",
            asked_model=asked.asked_model or asked.model,
            model_rule=rule.value,
        )
        self.deliver(port.FellBack(asked.number, there.model, there.region, self._possible(asked), rule.value, words))
        return asked, there

    def _queue_at_fallback(self, request: Request, there: Endpoint, rule: ModelRule) -> None:
        """Queue *request*, which waits or has left its instance, at *there* for the fallback of its model."""
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        request.asked, _ = self._fall_back(request.asked, there, rule)
        request.predicted_tokens, request.estimate = self._possible(request.asked), None
        request.failed_before, request.failed_at = request.attempts - request.evictions, []
        request.output_tokens, request.evicting_s = 0, None
        self.queue.add(request, there)
        self.placement.pump(there)
        if request.slot >= 0:
            self.waits.add(request)

    def _candidates(self, asked: port.Submit) -> NDArray[np.int32]:
        """Return the endpoints that may serve *asked*, in order of preference; for an adapter those that serve it."""
        topology = self.topology
        candidates = topology.candidates(asked.model, asked.region, asked.opportunistic)
        if not asked.adapter:
            return candidates
        return np.array(
            [at for at in candidates.tolist() if topology.serves_adapters(topology.endpoints[at])], np.int32
        )

    def _enqueue(self, request: Request, endpoint: Endpoint) -> None:
        self.runs.come(request)
        self.queue.add(request, endpoint)
        number, own_region, request.own_region = request.asked.number, request.own_region, ""
        released, request.release = request.release, None
        self.deliver(
            port.Moved(number, endpoint.spec.region, request.predicted_tokens, own_region=own_region, released=released)
        )
        self.placement.pump(endpoint)
        if request.slot >= 0:
            self.waits.add(request)
            if self._waits_too_long(request):
                return
            if request.attempts or not (released or self._passes_door(request, endpoint)):
                return
            if (estimate := self._estimated(request)) is not None:
                if released:
                    # Work that comes later goes first: its wait says nothing of other classes.
                    request.estimate = dataclass_replace(estimate, says_throughput=False)
                wait = estimate.wait
                mean_s, p99_s = (wait.mean_s, wait.quantile_s()) if wait else (None, None)
                self.deliver(port.Waiting(number, estimate.position, mean_s, p99_s))

    def _waits_too_long(self, request: Request, waited_s: float = 0.0) -> bool:
        """Whether the fallback of its model serves *request*, which waits: it is queued there then.

        By its estimated wait, or because it has waited so long, or nothing serves its model any longer.
        """
        asked = request.asked
        if not asked.fallback or request.has_begun or request.released_s is not None or request.endpoint.is_spot:
            return False
        estimate = self._estimated(request) if asked.fallback_wait_s is not None else None
        expected_s = estimate.wait.mean_s if estimate is not None and estimate.wait is not None else 0.0
        fallback = self._fallback(asked, max(waited_s, expected_s))
        if fallback is not None:
            self._queue_at_fallback(request, *fallback)
        return fallback is not None

    def _estimated(self, request: Request) -> Estimate | None:
        """Return the estimated wait of *request*; None if it waits no longer."""
        if request.slot >= 0 and request.estimate is None:
            request.estimate = self.waits.of(request)
        return request.estimate if request.slot >= 0 else None

    def _passes_door(self, request: Request, endpoint: Endpoint) -> bool:
        """Estimate the wait of *request*, which has just been queued, and decide on its promise; False if it is refused.

        It may be degraded, and an instance may have room for it then.
        """
        number, own = request.asked.number, request.asked.slo_class
        verdict = decide(
            _terms_of(request.asked), request.asked.fallbacks, lambda terms: self._expected(request, endpoint, terms)
        )
        wait = verdict.wait
        if verdict.refused and wait is not None:
            self._drop(request, self._unreachable(request, verdict, wait))
            return False
        if request.estimate is not None and verdict.terms.slo_class != own:
            # It is overtaken by what comes later: its wait says nothing of other classes.
            request.estimate = dataclass_replace(request.estimate, says_throughput=False)
        if verdict.late_s or verdict.terms.slo_class != own:
            p99_s = wait.quantile_s() if wait else 0.0
            self.deliver(port.AtDoor(number, verdict.terms.slo_class, verdict.late_s, p99_s))
        return True

    def _expected(self, request: Request, endpoint: Endpoint, terms: ClassTerms) -> tuple[Wait | None, float]:
        """Queue *request* on *terms*; return its estimated wait, and by how much it will miss its promise."""
        if terms.slo_class != request.asked.slo_class:
            self.queue.take_out(request.slot)
            request.asked = replace(
                request.asked,
                slo_class=terms.slo_class,
                priority=terms.priority,
                due_s=terms.due_s,
                end_s=terms.end_s,
                deadline_s=terms.deadline_s,
                interactive=terms.interactive,
                opportunistic=terms.opportunistic,
                ends_on_reclaim=terms.ends_on_reclaim,
                if_unreachable=terms.if_unreachable,
            )
            request.estimate = None
            if self.holding.holds(request.asked):
                self.holding.hold(request)
                return None, 0.0
            self.queue.add(request, endpoint)
            self.placement.pump(endpoint)
            if request.slot < 0:
                return Wait(), 0.0
            self.waits.add(request)
        estimate = request.estimate = self.waits.of(request)
        calibration = self.waits.calibration(endpoint, terms.slo_class)
        return estimate.wait, calibration.late_s(estimate.wait, self._due_in_s(request), self._prefill_s(request))

    def _due_in_s(self, request: Request) -> float:
        """Return seconds until the first token of *request* is due, infinity for never."""
        asked = request.asked
        profile, output = request.endpoint.spec.profile, request.predicted_tokens
        passed_s = self.clock() - asked.arrived_s
        return first_due_of(profile, asked, asked.prompt_tokens, output) - passed_s

    def _prefill_s(self, request: Request) -> float:
        return request.endpoint.spec.profile.service_time_s(request.asked.prompt_tokens, 1)

    def _unreachable(self, request: Request, verdict: Verdict, wait: Wait) -> port.Refused:
        factor = self.waits.calibration(request.endpoint, verdict.terms.slo_class).factor
        first_s = factor * wait.quantile_s() + self._prefill_s(request)
        due_s = max(0.0, first_s - verdict.late_s)
        return port.Refused(
            request.asked.number,
            429,
            "deadline_unreachable",
            f"The first token is due in {due_s:.1f} s to keep the promise of the class {verdict.terms.slo_class!r}, and can "
            f"be promised in {first_s:.1f} s. Try again in {verdict.late_s:.0f} s, or in a class with more time.",
            retry_after_s=max(1.0, verdict.late_s),
            estimated_wait_s=wait.mean_s,
            region=request.endpoint.region,
            earliest_at=request.asked.arrived_at + self.clock() - request.asked.arrived_s + first_s,
        )

    def _possible(self, asked: port.Submit) -> int:
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

    def _full(self, asked: port.Submit, endpoint: Endpoint, own_region: str) -> port.Refused:
        wait_s = self.estimated_wait_s(endpoint)
        return port.Refused(
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

    def _progress(self, progress: port.Progress) -> None:
        fleet, now_s, requests = self.topology.fleet, self.clock(), self._requests
        for number, took_s in progress.headers:
            if (request := requests.get(number)) is not None and request.replica is not None:
                request.replica.health.heard(now_s)
                request.replica.round_trip.headers_came(fleet, request.replica.slot, took_s, now_s)
        came = [(requests[number], tokens) for number, tokens in progress.tokens if number in requests]
        for request, _ in came:
            if request.replica is not None:
                request.replica.health.heard(now_s, served=True)
        self.accounts.advance((request, tokens - request.kept_tokens) for request, tokens in came)

    def _finished(self, finished: port.Finished) -> None:
        """Learn length and pace from an answered request, and release it."""
        request = self._requests.get(finished.number)
        if request is None:
            return
        self.waits.finished(request, finished.output_tokens)
        self.suspects.clear(request.asked)
        replica = request.replica
        if replica is not None:
            now_s = self.clock()
            self.topology.note_success(replica, now_s)
            for failed, why in request.unproved:
                self.topology.note_failure(failed, why, now_s)
            replica.request_ended_s = now_s
            replica.endpoint.finished_s.append(now_s)
            replica.round_trip.request_ended(now_s - request.placed_s)
            note_end(self.topology.fleet, replica.slot, self.queue.moment_s)
            self.queue.settle(request, finished.output_tokens - request.kept_tokens)
        self._end(request, finished.output_tokens)

    def _left(self, left: port.Left) -> None:
        """Release a request, or only take it off its instance, and count that instance's failure."""
        request = self._requests.get(left.number)
        if request is None:
            if left.again:  # the gateway waits for it to be placed
                message = "The request is not known to the dispatcher any longer."
                self.deliver(port.Refused(left.number, 503, "model_unavailable", message, retry_after_s=1))
            return
        replica = request.replica
        if replica is not None and left.failure:
            self._note_failure(request, replica, left)
        if replica is not None:
            self.queue.settle(request, request.output_tokens)
        if replica is not None and left.adapter_failed:
            drop_adapter(self.topology.fleet, replica.slot, request.adapter)
        if replica is not None and left.failure == port.CUT:
            self.suspects.was_cut(request, replica)
        if not left.again:
            self._end(request)
            return
        self._withdraw(request)
        request.evictions += left.evicted
        _keep(request, left.kept_tokens)
        self._place_again(request, busy=left.failure == port.BUSY)

    def _note_failure(self, request: Request, replica: Replica, left: port.Left) -> None:
        topology, now_s = self.topology, self.clock()
        request.failed_at.append(replica)
        replica.health.failures += left.failure != port.BUSY
        if left.failure in (port.SILENT, port.CUT):
            replica.reachable = False  # until its next heartbeat
            topology.doubt(replica)
        elif left.failure == port.DEAD and not replica.lost:
            replica.lost = "its engine died"
            self.died(replica)
        if left.failure == port.BUSY:
            topology.note_busy(replica, left.reason, now_s, left.wait_s)
        elif left.failure == port.ERROR and left.again:  # of the instance or of the request: another instance decides
            request.unproved.append((replica, left.reason))
        else:
            topology.note_failure(replica, left.reason, now_s)

    def _want_prefixes(self, models: frozenset[str]) -> None:
        """Request prefixes of waiting requests for *models*, whose router did not need them on arrival."""
        for request in list(self._requests.values()):
            if request.asked.model in models and request.slot >= 0 and not request.asked.prefix_hashes:
                self.deliver(port.PrefixWanted(request.asked.number))

    def _prefix(self, prefix: port.Prefix) -> None:
        request = self._requests.get(prefix.number)
        if request is not None:
            request.asked = replace(request.asked, prefix_hashes=prefix.hashes, block_tokens=prefix.block_tokens)
            if request.slot >= 0:
                self.queue.note_prefix(request)

    def _end(self, request: Request, output_tokens: int | None = None) -> None:
        """Forget *request*, wherever it is: every request leaves here. Without *output_tokens* it was not answered."""
        number = request.asked.number
        self.runs.end(number, output_tokens)
        self._withdraw(request)
        del self._requests[number]

    def _withdraw(self, request: Request) -> None:
        """Take *request* out of its queue, off its instance or from the queue manager, and give its room to others."""
        self.placement.release(request)
        replica = self.accounts.close(request)
        self.holding.drop(request.asked.number)
        if request.slot >= 0:
            self.queue.take_out(request.slot)
        if replica is not None:
            if replica.health.breaker is not Breaker.CLOSED:
                self.topology.settle(replica)
            self.placement.pump(replica.endpoint)

    def _place_again(self, request: Request, *, busy: bool = False) -> None:
        """Queue *request* again after its instance failed it or it was evicted, with its first queue key.

        Instances that have not failed it are preferred. Refused after too many attempts (502), when nothing serves the model
        any longer (503), or when it was refused as *busy* and nothing else can take it.
        """
        asked = request.asked
        failed = request.attempts - request.evictions - request.failed_before
        if (refusal := self.suspects.refusal(asked)) is not None:
            self._drop(request, refusal)
            return
        elsewhere = self._takes_elsewhere(request, request.failed_at)
        if asked.fallback and failed and not request.has_begun and (failed >= MAX_ATTEMPTS or not elsewhere):
            there = self.placement.serving(self.topology.candidates(asked.fallback, asked.region))
            if there is not None and not there.spec.policy.is_full(self.queue.count(there)):
                self._queue_at_fallback(request, there, ModelRule.FAILURE)
                return
        if busy and (failed >= MAX_ATTEMPTS or not elsewhere):
            message = f"Every instance of {asked.model!r} that could take the request is busy."
            self._refuse(request, 503, port.INSTANCES_BUSY, message, 1)
            return
        if failed >= MAX_ATTEMPTS:
            message = f"The request was tried on {failed} instances, and each failed before it answered."
            self._refuse(request, 502, "upstream_failed", message, 5)
            return
        request.output_tokens, request.evicting_s = 0, None
        without: Iterable[Replica] = request.failed_at if elsewhere else ()
        if self.suspects.is_suspect(asked):  # two suspects on one instance could not be distinguished
            others = [*request.failed_at, *self.suspects.instances()]
            without = others if self._takes_elsewhere(request, others) else without
        with self.topology.without(without):
            endpoint = self.placement.choose_endpoint(self._candidates(asked))
            if endpoint is None:
                self._drop(request, _none_serves(asked))
                return
            self._enqueue(request, endpoint)
        if request.slot >= 0:  # no other instance has room
            self.placement.pump(endpoint)

    def _takes_elsewhere(self, request: Request, without: Collection[Replica]) -> bool:
        """Whether an instance of the model of *request* that is not among *without* accepts work."""
        accepting, model = self.topology.fleet.accepting, request.asked.model
        return any(
            one.spec.model == model and accepting[one.slot] and one not in without
            for one in self.topology.replicas.values()
        )

    def rehome(self, endpoint: Endpoint, now_s: float) -> None:
        """Move requests that wait for *endpoint* to a better one, as long as there is one."""
        topology, queue = self.topology, self.queue
        kept = set[bool]()  # whether requests of a kind stay
        spill_above = endpoint.spec.policy.region_threshold
        for request in self._waiting_in_order(endpoint):
            opportunistic = request.asked.opportunistic
            if opportunistic in kept:
                continue
            candidates = topology.candidates(endpoint.model, endpoint.region, opportunistic)
            index = better_home(
                topology.fleet, topology.arrays, candidates, queue.arrays.size, endpoint.index, spill_above, now_s
            )
            if index < 0:
                others = [topology.endpoints[other] for other in candidates.tolist()]
                if any(other.can_start or topology.coming(other) for other in others):
                    kept.add(opportunistic)
                    continue
                message = f"The last instance of {endpoint.model!r} went away."
                self._refuse(request, 503, "model_unavailable", message, 15)
                continue
            if index == endpoint.index:
                kept.add(opportunistic)
                continue
            if request.adapter >= 0 and not topology.serves_adapters(topology.endpoints[index]):
                continue
            here = pressure(topology.fleet, topology.arrays, endpoint.index, queue.count(endpoint), now_s)
            target = topology.endpoints[index]
            queue.move(request, target)
            self.deliver(
                port.Moved(
                    request.asked.number,
                    target.region,
                    request.predicted_tokens,
                    came_from=endpoint.region,
                    pressure=None if math.isinf(here) else float(here),
                )
            )
            self.placement.pump(target)

    def _give_up_late(self, request: Request) -> bool:
        """Refuse *request*, which waits, if it may wait no longer (docs/tenants/api.md); return whether it is."""
        asked, tuned = request.asked, request.endpoint.spec.tuned
        waited_s, held_s = (
            self.clock() - asked.arrived_s,
            hold_s(math.inf if asked.deadline_s is None else asked.deadline_s, tuned.MAX_HOLD_S),
        )
        if request.has_begun:
            return False
        if asked.max_wait_s is not None and waited_s > asked.max_wait_s:
            why = (
                f"No instance had room within {asked.max_wait_s:g} s, as long as X-Max-Wait says that the caller waits."
            )
            self._refuse(request, 504, "max_wait_expired", why, self._retry_s(request.endpoint))
            return True
        left_s = None
        if asked.deadline_s is None:
            left_s = self.waits.start_left_s(request.endpoint) if request.endpoint.starting else None
            if tuned.HOLD_FOR_STARTS:
                waited_s = min(waited_s, self.clock() - request.endpoint.up_s)
        too_late = waited_s + (left_s or 0.0) > held_s and (left_s is None or not tuned.HOLD_FOR_STARTS)
        if too_late:
            why = f"No instance had room within {held_s:.0f} s."
            if left_s is not None:
                why = f"{asked.model} starts, which takes {left_s:.0f} s more. Its requests wait {held_s:.0f} s at the most."
            self._refuse(request, 503, "hold_expired", why, self._retry_s(request.endpoint))
        return too_late

    def _retry_s(self, endpoint: Endpoint) -> float:
        """Return when a refused request for *endpoint* may be sent again: once it should be served."""
        return self.waits.start_left_s(endpoint) or self.estimated_wait_s(endpoint) or RETRY_S

    def _refuse(self, request: Request, status: int, code: str, message: str, retry_after_s: float) -> None:
        self._drop(request, port.Refused(request.asked.number, status, code, message, retry_after_s=retry_after_s))

    def _drop(self, request: Request, refused: port.Refused) -> None:
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

    def calls_of(self, application: tuple[int, str], run: str) -> list[Request]:
        """Return the open calls of a run."""
        return [
            each
            for each in self._requests.values()
            if each.asked.run == run and (each.asked.tenant_id, each.asked.application) == application
        ]

    def stop_run(self, application: tuple[int, str], run: str) -> None:
        """End all open calls of a run, and refuse later ones."""
        self.runs.stop(application, run)
        for request in self.calls_of(application, run):
            if request.replica is None:
                self._drop(request, _run_stopped(request.asked))
            else:
                self.deliver(port.Lost(request.asked.number, stopped=True))

    def reclaim(self, replica: Replica, *, late: bool) -> tuple[int, int]:
        """Take the requests off *replica*, which is donated and reclaimed; return how many wait again, and how many ended.

        One that has begun an answer which no other instance can continue ends by itself, unless the reclaim is *late*.
        """
        evicted = ended = 0
        for request in list(replica.requests):
            number = request.asked.number
            if late or request.asked.ends_on_reclaim:
                if request.evicting_s != math.inf:
                    request.evicting_s = math.inf  # it ends
                    self.deliver(port.Lost(number, reclaimed=True))
                    ended += 1
            elif request.evicting_s is None and self.evict(number) is not None:
                evicted += 1
        return evicted, ended

    # Reading

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Return the mean wait of a request that joins the queue of *endpoint* last; None while unknown."""
        wait = self.waits.of_next(endpoint)
        return None if wait is None else wait.mean_s

    def waiting(self, endpoint: Endpoint) -> int:
        """Return the number of requests that wait for *endpoint*."""
        return self.queue.count(endpoint)

    def waiting_now(self, most: int) -> Iterator[tuple[Request, Estimate]]:
        """Yield the first *most* waiting requests of each endpoint in order, with their remaining waits as of when they are
        yielded; none that has left by then.
        """
        for requests in [self.queue.first(each, most) for each in self.topology.endpoints]:
            yield from ((request, self.waits.of(request)) for request in requests if request.slot >= 0)

    def held_now(self, most: int) -> list[HeldEstimate]:
        """Return the first *most* requests of each model that the queue manager holds, in order."""
        return self.holding.estimates(most)

    def oldest_wait_s(self, endpoint: Endpoint) -> float:
        arrived_s = (one.asked.arrived_s for one in self.queue.of(endpoint))
        return self.clock() - min(arrived_s, default=self.clock())

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """Return the outlook of *endpoint* from its look-ahead maps and the prompts that wait for it."""
        return self.accounts.outlook(endpoint, self.queue.prompt_tokens(endpoint))


def _keep(request: Request, kept_tokens: int) -> None:
    """Make the kept output of *request* part of its prompt for the next instance."""
    asked, more = request.asked, kept_tokens - request.kept_tokens
    most = None if asked.max_tokens is None else max(1, asked.max_tokens - more)
    request.asked = replace(asked, prompt_tokens=asked.prompt_tokens + more, max_tokens=most)
    request.predicted_tokens = max(1, request.predicted_tokens - more)
    request.kept_tokens = kept_tokens


def _terms_of(asked: port.Submit) -> ClassTerms:
    return ClassTerms(
        asked.slo_class,
        asked.priority,
        asked.due_s,
        asked.end_s,
        asked.deadline_s,
        asked.interactive,
        asked.opportunistic,
        asked.ends_on_reclaim,
        asked.if_unreachable,
    )


def _run_stopped(asked: port.Submit) -> port.Refused:
    return port.Refused(asked.number, 409, "run_stopped", "An operator has stopped this run.", None)


def _no_adapters(asked: port.Submit, own_region: str = "") -> port.Refused:
    return port.Refused(
        asked.number,
        503,
        "adapters_unavailable",
        f"No instance of {asked.model!r} serves adapters now, so {asked.adapter!r} is not available: its deployments have "
        "max_loras = 0, or their instances were started before it was set.",
        retry_after_s=15,
        own_region=own_region,
    )


def _none_serves(asked: port.Submit, own_region: str = "") -> port.Refused:
    return port.Refused(
        asked.number,
        503,
        "model_unavailable",
        f"No instance of {asked.model!r} is serving or being started.",
        retry_after_s=15,
        own_region=own_region,
    )
