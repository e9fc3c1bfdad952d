"""Problems to put into an order: of any size with a given load, and small ones for Hypothesis."""

import math

import numpy as np
from hypothesis import strategies as st

from scheduling.queueing.reordering.problem import Problem, contiguous

BATCH = 110
"""Requests that an instance runs at once."""
DELTA = 4
"""Groups hold up to this many batches (QLM section 8.3)."""


def synthetic(queues, groups, load, seed, models=4, a10=0.4, horizon_s=None):
    """Return groups of 4 models that wait for a mixed fleet of A100 and A10; nothing was measured on a GPU."""
    random = np.random.default_rng([seed, queues, groups])
    model = random.integers(0, models, groups)
    requests = np.where(random.random(groups) < 1 / 6, random.integers(20, BATCH * DELTA, groups), BATCH * DELTA)
    tokens_per_s = random.uniform(1500, 3500, models)
    slower = random.uniform(2.2, 3.5, models)
    output = random.uniform(100, 400, groups)
    fast = requests * output / tokens_per_s[model]
    service = np.stack([fast, fast * slower[model]], axis=1)
    biggest = int(tokens_per_s.argmin())
    if models > 1:
        service[model == biggest, 1] = np.inf
    queue_type = (random.permutation(queues) < round(a10 * queues)).astype(np.int64)
    size = random.uniform(5, 20, models)
    swap = np.stack([size, 2 * size], axis=1).T
    if models > 1:
        swap[1, biggest] = np.inf
    drain = random.uniform(20, 50, (2, models))
    loadable = np.array([np.flatnonzero(np.isfinite(swap[kind]))[random.integers(0, np.isfinite(swap[kind]).sum())]
                         for kind in queue_type])  # fmt: skip
    speed = np.where(queue_type == 0, 1.0, 1.0 / slower.mean()).sum()
    if horizon_s is None:
        horizon_s = fast.sum() / speed / load
    due = random.uniform(0, horizon_s, groups)
    own = service - np.minimum(1.0, BATCH / requests)[:, None] * np.where(np.isfinite(service), service, 0.0)
    return contiguous(
        Problem(
            requests=requests,
            model=model,
            due_s=due,
            service_s=service,
            own_s=own,
            queue_type=queue_type,
            free_s=random.uniform(0, 30, queues),
            loaded=loadable,
            swap_s=swap,
            drain_s=drain,
            fixed=np.full(groups, -1),
        )
    )


@st.composite
def small_problems(draw, most_groups=6, most_queues=2, whole=True):
    """Problems of a few groups: deadlines over or absent, models that a type cannot serve, queues with nothing loaded.

    With *whole* every queue can load every model, so that each order can be carried out.
    """
    n, queues = draw(st.integers(1, most_groups)), draw(st.integers(1, most_queues))
    models, types = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    numbers = st.integers(0, 40)

    def table(rows, columns, least=0):
        return np.array([[draw(numbers) + least for _ in range(columns)] for _ in range(rows)], float)

    service, swap = table(n, types, 1), table(types, models)
    if not whole:
        service[np.array([[draw(st.integers(0, 7)) == 0 for _ in range(types)] for _ in range(n)])] = np.inf
        swap[np.array([[draw(st.integers(0, 7)) == 0 for _ in range(models)] for _ in range(types)])] = np.inf
    requests = np.array([draw(st.integers(1, 20)) for _ in range(n)])
    due = [draw(st.one_of(st.integers(-20, 150), st.just(math.inf))) for _ in range(n)]
    kept = np.array([draw(st.sampled_from([0.0, 0.5, 0.75])) for _ in range(n)])[:, None]
    return contiguous(
        Problem(
            requests=requests,
            model=np.array([draw(st.integers(0, models - 1)) for _ in range(n)]),
            due_s=np.array(due, float),
            service_s=service,
            own_s=kept * np.where(np.isfinite(service), service, 0.0),
            queue_type=np.array([draw(st.integers(0, types - 1)) for _ in range(queues)]),
            free_s=np.array([draw(numbers) for _ in range(queues)], float),
            loaded=np.array([draw(st.integers(-1, models - 1)) for _ in range(queues)]),
            swap_s=swap,
            drain_s=table(types, models),
            fixed=np.full(n, -1),
        )
    )
