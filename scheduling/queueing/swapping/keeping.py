"""Instances that keep their shared GPUs for requests yet to come.

An order of waiting groups ignores requests that arrive during a swap: a model that serves each of its requests at once has
nothing waiting, so giving its GPUs away seems free. By Little's law the running requests reflect its demand, and so the
value of its GPUs.
"""

import numpy as np

from scheduling.fleet.arrays import FleetArrays
from scheduling.fleet.kv_cost import prefill_s
from scheduling.queueing.groups import GroupArrays
from scheduling.queueing.swapping.service import USUAL_STEP_S, batch_of
from scheduling.queueing.swapping.sharing import COMES, WAITS
from scheduling.queueing.waiting_set import WaitingArrays


def kept_queues(fleet: FleetArrays, waiting: WaitingArrays) -> frozenset[int]:
    """Return the virtual queues of shared GPUs that stay with the model that has them.

    Of a model for which nothing waits, as many as its running requests would fill, each while it completes more requests a
    second there than any waiting model would. None at all while a waiting model has no GPUs, or it would never get any.
    """
    arrays = waiting.groups
    shared = np.flatnonzero((arrays.swap_s < np.inf) & (fleet.endpoint[: arrays.swap_s.size] >= 0)).tolist()
    holders: dict[int, list[int]] = {}
    for instance in shared:
        if fleet.accepting[instance]:
            holders.setdefault(int(fleet.endpoint[instance]), []).append(instance)
    served = {int(endpoint) for endpoint in fleet.endpoint[fleet.accepting[: fleet.endpoint.size] != 0]}
    served |= {int(fleet.endpoint[each]) for each in shared if arrays.phase[each] in (WAITS, COMES)}
    wait = {int(fleet.endpoint[each]) for each in shared if waiting.size[fleet.endpoint[each]]}
    if not wait or not wait <= served:
        return frozenset()
    kept: set[int] = set()
    for endpoint, instances in holders.items():
        if endpoint in wait:
            continue  # an order accounts for these
        instances.sort(key=lambda each: (-int(fleet.running[each]), each))
        asked_per_s = sum(_per_s(fleet, arrays, each, float(fleet.running[each])) for each in instances)
        for instance in instances:
            queue = int(arrays.queue_of[instance])
            others = (each for each in shared if arrays.queue_of[each] == queue and int(fleet.endpoint[each]) in wait)
            most_per_s = max((_per_s(fleet, arrays, each) for each in others), default=0.0)
            if min(asked_per_s, _per_s(fleet, arrays, instance)) <= most_per_s:
                break
            kept.add(queue)
            asked_per_s -= _per_s(fleet, arrays, instance)
    return frozenset(kept)


def _per_s(fleet: FleetArrays, arrays: GroupArrays, instance: int, running: float = np.inf) -> float:
    """Return usual requests that *instance* completes per second with so many running, or with a full batch."""
    running = min(running, float(batch_of(fleet, arrays, instance)))
    if running <= 0.0:
        return 0.0
    endpoint = int(fleet.endpoint[instance])
    output = float(arrays.mean_output[endpoint])
    prompt = float(arrays.mean_tokens[endpoint]) - output
    constant_s, of_sequence_s, of_token_s = fleet.profile[instance, 4:7].tolist()
    step_s = constant_s + running * (of_sequence_s + of_token_s * (prompt + 0.5 * output))
    takes_s = output * (step_s if constant_s > 0.0 else USUAL_STEP_S) / running + prefill_s(fleet, instance, prompt)
    return 1.0 / takes_s if takes_s > 0.0 else 0.0
