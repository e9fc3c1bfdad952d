"""The dispatcher: the core with its list of stages, the gateway's records, and what pages read of it."""

from collections.abc import Callable, Iterator

from controlplane.dispatch import port
from controlplane.dispatch.adapters import Adapters
from controlplane.dispatch.core import Core
from controlplane.dispatch.fallbacks import ModelFallbacks
from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.holding import HeldEstimate, HeldRequests
from controlplane.dispatch.live_fleet.inventory import Inventory
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.observation import Demand
from controlplane.dispatch.outcomes import Outcomes
from controlplane.dispatch.prewarming import LivePrewarming
from controlplane.dispatch.promises import Promises
from controlplane.dispatch.reordering import ReorderedQueues, Solver
from controlplane.dispatch.runs import ApplicationRuns, run_stopped
from controlplane.dispatch.spot import Spot
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.suspects import Suspects
from controlplane.dispatch.sweeping import Sweeping
from controlplane.dispatch.token_accounts import Outlook
from controlplane.dispatch.waits import WaitEstimates
from scheduling.queueing.waits.waiting_time import Estimate
from scheduling.routing.models import ModelRule


class Dispatcher(Core):
    """Takes the gateway's records with `take`, and answers through *deliver*; *background* orders long queues."""

    def __init__(
        self, topology: Topology, clock: Callable[[], float], *, deliver: port.Deliver, background: Solver | None = None
    ) -> None:
        super().__init__(topology, clock, deliver)
        self.suspects = Suspects(topology, clock)
        self.outcomes = Outcomes(topology, self.queue, clock, self.suspects.died)
        self.adapters = Adapters(topology)
        self.spot = Spot(self, self.queue)
        self.fleet = LiveFleet(
            self,
            expire=self.guarded(self._expire),
            spot_with_room=self.spot.with_room,
            hold=self._hold,
            become=self._become,
        )
        self.runs = ApplicationRuns(self.fleet, self.placement.pump)
        self.prewarming = LivePrewarming(self.fleet, self.runs)
        self.waits = WaitEstimates(self.fleet)
        self.fallbacks = ModelFallbacks(self, self.waits)
        self.reordering = ReorderedQueues(self.fleet, clock, background)
        self.holding = HeldRequests(self.fleet, deliver)
        acting = self.queue, self.placement, self.waits, self.holding
        self.sweeping = Sweeping(self, *acting, self.fallbacks)
        self.features: tuple[Stage, ...] = (
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
            Promises(self, self.waits),
            self.blocks,
            self.accounts,
            self.reordering,
            self.queue,
            self.sweeping,
        )
        """All stages in order; the core runs those that are enabled."""
        self._enable()

    def _enable(self) -> None:
        self.run_stages([one for one in self.features if one in self.stages or one.is_wanted()])

    def take(self, record: port.FromGateway) -> None:
        """Act on a record of the gateway; decisions are delivered before this returns, or later."""
        match record:
            case port.Advanced():
                for number, took_s in record.headers:
                    if (request := self.requests.get(number)) is not None:
                        self.outcomes.headers(request, took_s)
                self.advance(record.tokens)
            case port.Asked():
                self.admit(record)
            case port.Open():
                self.reopen(record)
            case port.RunReport():
                self.runs.report(record)
            case port.Finished():
                if (request := self.requests.get(record.number)) is not None:
                    self.finish(request, record.output_tokens)
            case port.Left():
                self._on_left(record)
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
                shard=model.shard,
            )
            for name, model in topology.models.items()
        )
        lora = {
            endpoint.model for endpoint in topology.endpoints if endpoint.spec.max_loras and topology.serves(endpoint)
        }
        adapters = (
            port.ServedModel(
                one.name, base.context_tokens, one.created_at, one.base in lora, one.base in topology.by_prefix, base.task,
                base=one.base, tokenizer=self.blocks.tokenizer(one.base), tenant_id=one.tenant_id, shard=base.shard,
            )
            for one in topology.adapters.values()
            if (base := topology.models.get(one.base)) is not None
        )  # fmt: skip
        self._enable()
        self.deliver(port.ServedModels((*models, *adapters), topology.targets))

    def pump_all(self) -> None:
        """Give out every request that has room. Call after any change of the topology."""
        self.placement.pump_all()

    def sweep(self) -> None:
        """Reorder, move or refuse requests that wait in vain. Call every `SWEEP_S`."""
        for step in self.sweep_steps:
            step()

    @property
    def sweep_steps(self) -> tuple[Callable[[], object], ...]:
        """Return the parts of `sweep`, in order: each leaves everything such that requests can be served before the next."""
        return self.hooks["sweep"]

    def _expire(self, request: Request) -> None:
        self.sweeping.expire(request)

    def _hold(self, request: Request) -> bool:
        """Hold *request*, which waits nowhere, if requests such as it are held; return whether it is."""
        if self.holding.holds(request.asked):
            self.holding.hold(request)
            return True
        return False

    def _become(self, request: Request, endpoint: Endpoint, rule: ModelRule) -> None:
        self.fallbacks.become(request, endpoint, rule)

    def _on_left(self, left: port.Left) -> None:
        request = self.requests.get(left.number)
        if request is not None:
            self.leave(request, left)
        elif left.again:  # the gateway waits for it to be placed
            message = "The request is not known to the dispatcher any longer."
            self.deliver(port.Refused(left.number, 503, "model_unavailable", message, retry_after_s=1))

    def lose(self, replica: Replica) -> None:
        """Give up *replica*; the gateway decides what to do for each of its requests."""
        for request in list(replica.requests):
            self.deliver(port.Lost(request.asked.number, request.attempts))

    def leave_region(self, region: str) -> None:
        """Leave *region*, which went dark: what waits there moves, and what runs there without output is retried."""
        topology = self.topology
        for endpoint in topology.endpoints:
            if endpoint.region == region:
                self.sweeping.rehome(endpoint)
        for replica in topology.replicas.values():
            if replica.spec.region == region:
                for request in [each for each in replica.requests if not each.output_tokens]:
                    self.deliver(port.Lost(request.asked.number, request.attempts))

    def stop_run(self, application: tuple[int, str], run: str) -> None:
        """End all open calls of a run, and refuse later ones."""
        self.runs.stop(application, run)
        for request in self.calls_of(application, run):
            if request.replica is None:
                self.drop(request, run_stopped(request.asked))
            else:
                self.deliver(port.Lost(request.asked.number, request.attempts, stopped=True))

    # Reading

    def calls_of(self, application: tuple[int, str], run: str) -> list[Request]:
        """Return the open calls of a run."""
        return [
            each
            for each in self.requests.values()
            if each.asked.run == run and (each.asked.tenant_id, each.asked.application) == application
        ]

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Return the mean wait of a request that joins the queue of *endpoint* last; None while unknown."""
        wait = self.waits.control.of_next(endpoint.index)
        return None if wait is None else wait.mean_s

    def waiting_now(self, most: int) -> Iterator[tuple[Request, Estimate]]:
        """Yield the first *most* waiting requests of each endpoint in order, with their remaining waits as of when they are
        yielded; none that has left by then."""
        for requests in [self.queue.in_order(each, most) for each in self.topology.endpoints]:
            yield from ((request, self.waits.control.of(request.row)) for request in requests if request.slot >= 0)

    def held_now(self, most: int) -> list[HeldEstimate]:
        """Return the first *most* requests of each model that the queue manager holds, in order."""
        return self.holding.estimates(most)

    def oldest_wait_s(self, endpoint: Endpoint) -> float:
        return self.clock() - min((one.asked.arrived_s for one in self.queue.of(endpoint)), default=self.clock())

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """Return the outlook of *endpoint* from its look-ahead maps and the prompts that wait for it."""
        return self.accounts.outlook(endpoint, self.queue.prompt_tokens(endpoint))
