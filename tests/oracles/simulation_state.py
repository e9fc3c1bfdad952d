"""Reading the state out of a simulation between two calls of `advance`."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scheduling.queueing.groups import FREE_GROUPS, KNOWN_CLASSES, NEXT_NUMBER
from scheduling.routing.regions import asked_work_s
from scheduling.simulation.cluster.world import Outcome, World
from scheduling.simulation.engine.state import IDLE, NONE
from scheduling.simulation.state.records import (
    EndpointState,
    FleetState,
    Groups,
    GroupState,
    Held,
    InstanceState,
    Running,
    Where,
    Work,
)
from scheduling.simulation.workload.requests import Requests

if TYPE_CHECKING:
    from scheduling.simulation.simulator import Simulation


def state_of(simulation: "Simulation") -> FleetState:
    """The state of *simulation*, which `advance` has brought up to its `now_s`.

    Caches of prefixes are not in it. What ticks from outside (`Control`) keeps its own memory.
    """
    world, run_state = simulation.world, simulation.world.run_state[0]
    arrived = int(run_state.arrived)
    held = np.flatnonzero(np.isin(world.outcomes["state"][:arrived], (Outcome.WAITING, Outcome.RUNNING)))
    row = {int(request): at for at, request in enumerate(held)}
    waiting, slots = _waiting(world, row)
    return FleetState(
        now_s=simulation.now_s,
        requests=choose(simulation.requests, held),
        outcomes=world.outcomes[held].copy(),
        instances=[_instance(simulation, at, row) for at in range(world.fleet.endpoint.size)],
        endpoints=[_endpoint(world, at) for at in range(world.policies.size)],
        waiting=waiting,
        groups=_groups(simulation, slots) if world.waiting.groups.limit.any() else None,
        travelling=_travelling(world, row),
        kept_tokens=world.kept_tokens[held] if world.kept_tokens.size > 1 else None,
        sweep_s=float(run_state.sweep_s),
        reclaims_s=world.lives.reclaims_s[int(run_state.reclaims) :].tolist(),
        swap_targets=world.lives.groups["target"].tolist(),
    )


def coming_after(simulation: "Simulation") -> Requests:
    """The requests of *simulation* that have not come yet."""
    arrived = int(simulation.world.run_state[0].arrived)
    return choose(simulation.requests, np.arange(arrived, simulation.requests.count))


def _endpoint(world: World, at: int) -> EndpointState:
    policy: Any = world.policies[at]
    node = 2 * world.fleet.endpoint.size + world.link.shape[1] + at
    leaf = (world.events.time_s.size >> 1) + node
    return EndpointState(
        cursor=int(world.endpoints.cursor[at]),
        asked_work_s=float(asked_work_s(world.endpoints, at, float(world.run_state[0].now_s))),
        scaled_s=float(policy.scaled_s),
        batch_opened_s=float(policy.batch_opened_s),
        batch_due_s=float(world.events.time_s[leaf]),
    )


def _instance(simulation: "Simulation", at: int, row: dict[int, int]) -> InstanceState:
    world = simulation.world
    life: Any = world.lives.instances[at]
    fleet, count, half = world.fleet, world.fleet.endpoint.size, world.events.time_s.size >> 1
    return InstanceState(
        state=int(life.state),
        endpoint=int(fleet.endpoint[at]),
        since_s=float(life.since_s),
        ends_s=float(world.events.time_s[half + count + at]),
        goal=int(life.goal),
        goal_endpoint=int(life.goal_endpoint),
        goal_s=float(life.goal_s),
        loading_s=float(life.loading_s),
        in_memory=bool(life.in_memory),
        models=list(simulation.lives.used[at]),
        round_trips=fleet.round_trips[at].copy(),
        loads=(int(fleet.kv_tokens[at]), int(fleet.remaining_tokens[at]), int(fleet.queued_prompt_tokens[at])),
        limits=(int(fleet.max_num_seqs[at]), int(fleet.kv_capacity_tokens[at])),
        placed_tokens=int(fleet.placed_tokens[at]),
        moved=at in simulation.lives.moved,
        requests=_running(world, at, row),
        work=_work(world, at, float(world.events.time_s[half + at])),
    )


def _work(world: World, at: int, ends_s: float) -> Work | None:
    engine: Any = world.engines.instances[at]
    if engine.phase == IDLE:
        return None
    names = [name for name in Work.__slots__ if name != "ends_s"]
    return Work(**{name: engine[name].item() for name in names}, ends_s=ends_s)


def _running(world: World, at: int, row: dict[int, int]) -> list[Running]:
    engines = world.engines
    engine: Any = engines.instances[at]
    due = {
        int(engines.due_sequence[at, place]): int(engines.due[at, place] - engine.iteration)
        for place in range(int(engine.decoding))
    }
    joining = _chain(engines.sequences, int(engine.joining), "next_joining")
    sent = _chain(engines.sequences, int(world.sent[0, world.fleet.endpoint[at]]), "next")
    listed = [(one, Where.RUNNING) for one in _chain(engines.sequences, int(engine.first_running), "next")]
    listed += [(one, Where.WAITING) for one in _chain(engines.sequences, int(engine.first_waiting), "next")]
    listed += [(one, Where.SENT) for one in sent if engines.sequences[one]["instance"] == at]
    running = []
    for sequence, where in listed:
        this: Any = engines.sequences[sequence]
        mapped = engines.ahead.clock.size > 0 and engines.ahead.instance[sequence] != NONE
        running.append(
            Running(
                request=row[int(this.request)],
                where=where,
                expected_prompt=int(this.expected_prompt),
                expected_tokens=int(this.expected_tokens),
                produced_tokens=int(engine.iteration + this.offset) if this.decoding else int(this.produced_tokens),
                computed_tokens=int(this.computed_tokens),
                decoding=bool(this.decoding),
                streaming=bool(this.streaming),
                again=bool(this.again),
                leaving=bool(this.evicted),
                joins=joining.index(sequence) if sequence in joining else -1,
                prefilling=engine.partial == sequence,
                priority=int(this.priority),
                number=int(this.number),
                due_in=due.get(sequence),
                ahead=int(engines.ahead.clock[at] - engines.ahead.began[sequence]) if mapped else None,
                reaches_s=float(this.reaches_s) if where is Where.SENT else np.inf,
            )
        )
    return running


def _chain(records: Any, first: int, following: str) -> list[int]:
    chain = []
    while first != NONE:
        chain.append(first)
        first = int(records[first][following])
    return chain


def _waiting(world: World, row: dict[int, int]) -> tuple[list[Held], dict[int, int]]:
    """What waits, and its place in that list by slot of the waiting set."""
    waiting = world.waiting
    slots = np.flatnonzero(waiting.position >= 0)
    slots = slots[np.argsort(waiting.sequence[slots])].tolist()
    held = [
        Held(
            row[int(world.held[slot])],
            int(waiting.endpoint[slot]),
            float(waiting.key[slot]),
            int(waiting.prompt_tokens[slot]),
            int(waiting.output_tokens[slot]),
        )
        for slot in slots
    ]
    return held, {slot: at for at, slot in enumerate(slots)}


def _groups(simulation: "Simulation", slots: dict[int, int]) -> Groups:
    arrays = simulation.world.waiting.groups
    free = arrays.free[: int(arrays.counters[FREE_GROUPS])]
    in_use = np.flatnonzero(arrays.groups["endpoint"] >= 0)
    # Places that were never used lie at the bottom of the stack, the highest first.
    untouched = np.arange(arrays.groups.size - 1, arrays.groups.size - 1 - free.size, -1)
    differ = np.flatnonzero(free != untouched)
    reused = free[differ[0] :].tolist() if differ.size else []
    ranks = {
        group: rank
        for queue in range(arrays.queues.size)
        for rank, group in enumerate(_chain(arrays.groups, int(arrays.queues[queue]["first"]), "following"))
    }
    groups = []
    for place in in_use.tolist():
        this: Any = arrays.groups[place]
        groups.append(
            GroupState(
                place=place,
                endpoint=int(this.endpoint),
                kind=int(this.kind),
                number=int(this.number),
                joined=int(this.joined),
                prompt_tokens=float(this.prompt_tokens),
                output_tokens=float(this.output_tokens),
                opened_s=float(this.opened_s),
                hold_until_s=float(this.hold_until_s),
                pinned=bool(this.pinned),
                is_open=int(arrays.open[this.endpoint, this.kind]) == place,
                queue=int(this.queue),
                rank=ranks.get(place, 0),
                members=[slots[slot] for slot in _chain(arrays.members, int(this.first), "following")],
            )
        )
    known = int(arrays.counters[KNOWN_CLASSES])
    scheduler = simulation.scheduling.scheduler if simulation.scheduling else None
    made, left = scheduler.tried if scheduler else (-1, -1)
    return Groups(
        groups=groups,
        mean_tokens=arrays.mean_tokens.tolist(),
        mean_output=arrays.mean_output.tolist(),
        joined_s=float(arrays.moment_s[0]),
        classes=list(zip(arrays.class_priority[:known].tolist(), arrays.class_due_ms[:known].tolist(), strict=True)),
        next_number=int(arrays.counters[NEXT_NUMBER]),
        free_places=reused,
        looked_s=simulation.looked_s,
        tried=(made, arrays.groups.size - left) if made >= 0 else (-1, -1),
        tried_s=scheduler.tried_s if scheduler else -np.inf,
        short_instances=dict(scheduler.short_instances) if scheduler else {},
    )


def _travelling(world: World, row: dict[int, int]) -> list[tuple[int, int]]:
    travelling = []
    for link in range(world.link.shape[1]):
        request = int(world.link[0, link])
        while request != NONE:
            travelling.append((row[request], int(world.outcomes[request]["endpoint"])))
            request = int(world.travelling[request])
    return travelling


def choose(requests: Requests, rows: NDArray[np.integer[Any]]) -> Requests:
    """*rows* of *requests*, in that order, with their prefixes."""
    columns = {name: getattr(requests, name) for name in Requests._fields if not name.startswith("prefix")}
    chosen = {name: values[rows] for name, values in columns.items()}
    first, hashes = requests.prefix_first, requests.prefix_hashes
    if first.size:
        counts = np.diff(first)[rows]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        hashes = hashes[np.repeat(first[:-1][rows], counts) + within]
        first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Requests(**chosen, prefix_first=first, prefix_hashes=hashes)
