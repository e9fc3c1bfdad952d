"""QLM's global scheduler: 400,000 waiting requests in 1,000 groups on 50 instances at load 1, and 2,000 groups on
100.

Random problems (tests/scheduling/queueing/reordering/problems.py), with seeds not used to choose parameters; values are
medians over seeds. A gap is of the objective (lateness, and a fifth of the fleet's time more for being late at all) to
the best order known, of a search of `--best-s` in one thread and of all others. Budgets are processor time of each
thread, which other work on a machine affects less; `_s` and `_ms` are the resulting wall time, the minimum of two,
`_cpu` the processor's share in all `threads`. `first_call_s` is the first order in a new process whose kernels are on
disk, `first_compile_s` the same without any. `group_400k_ms` is for grouping 400,000 waiting requests of five models
from scratch (processor time), `group_one_us` the part of each; `view_1000_ms` for reading 1,000 groups on 50 instances
for the Queues page (processor time); `kmeans_ms` is for clustering them as Algorithm 1 of QLM does (mini-batches, as
many clusters as kinds of groups), and `kmeans_class_purity`, `kmeans_model_purity` the share of requests in their
cluster's majority class or model: 1 by the exact key. `timer_p99_ms` is how late a timer of the event loop fires at most,
99 times in 100, while a search runs in a thread, and `timer_alone_p99_ms` without them.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from scheduling.queueing.groups import BUCKETS
from scheduling.queueing.reordering.evaluate import evaluate
from scheduling.queueing.reordering.problem import Order, Problem, broken_rules
from scheduling.queueing.reordering.rules import RULES
from scheduling.queueing.reordering.scheduler import Answer, order_by, reorder, warm_up
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, regroup
from tests.scheduling.queueing.reordering.problems import synthetic

FIRST_SEED = 10
COLD_S, LONG_S, WARM_S = 0.086, 1.0, 0.042
CHURN = 0.02
FIRST_CALL = """
import time
began_s = time.perf_counter()
from scheduling.queueing.reordering.scheduler import warm_up
warm_up()
print(time.perf_counter() - began_s, time.process_time())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=7, help="problems of 50 x 1,000; one of 100 x 2,000")
    parser.add_argument(
        "--best-s", type=float, default=10.0, help="processor seconds of the search for the best order known"
    )
    parser.add_argument("--compile", action="store_true", help="measure first_compile_s too")


def timed(problem: Problem, previous: Order | None, budget_s: float) -> tuple[Answer, float, float]:
    """Return the answer, and wall and processor seconds, each the minimum of two runs; assert that no rule is
    broken.
    """
    walls_s, processor_s = [], []
    for _ in range(2):
        began_s, used_s = time.perf_counter(), time.process_time()
        answer = reorder(problem, previous, budget_s, clock=time.thread_time)
        walls_s.append(time.perf_counter() - began_s)
        processor_s.append(time.process_time() - used_s)
    if broken := broken_rules(problem, answer.order):
        raise AssertionError(f"an order broke rules: {broken[:3]}")
    return answer, min(walls_s), min(processor_s)


def best_known(problem: Problem, previous: Order | None, seconds: float, *answers: Answer) -> float:
    """Return the least known objective: a long search from scratch, one from the best order so far, and *answers*."""
    cold = reorder(problem, None, seconds * 0.7, seed=1, clock=time.thread_time)
    starts = [cold, *answers]
    start = min(starts, key=lambda answer: answer.after.objective)
    more = reorder(problem, start.order, seconds * 0.3, seed=2, clock=time.thread_time)
    return min(answer.after.objective for answer in [*starts, more])


def churned(problem: Problem, order: Order, seed: int) -> tuple[Problem, Order]:
    """Return *problem* with a share of its groups replaced by new ones that *order* does not have yet."""
    random = np.random.default_rng([seed, 3])
    queues, groups = problem.queue_type.size, problem.requests.size
    new = random.choice(groups, round(CHURN * groups), replace=False)
    other = random.permutation(groups)[: new.size]  # a new group is like a waiting one, but for its deadline
    changed = problem._replace(
        **{name: getattr(problem, name).copy() for name in ("requests", "model", "due_s", "service_s", "own_s")}
    )
    for name in ("requests", "model", "service_s", "own_s"):
        getattr(changed, name)[new] = getattr(problem, name)[other]
    changed.due_s[new] = random.uniform(0.0, problem.due_s.max(), new.size)
    gone = set(new.tolist())
    assert queues == order.first.size - 1
    return changed, Order.of([[group for group in row if group not in gone] for row in order.queues()])


def grouping() -> tuple[float, float]:
    """Return (CPU milliseconds to group 400,000 requests from scratch, microseconds per request), the minimum of
    five runs.
    """
    random = np.random.default_rng(FIRST_SEED)
    models, each = 5, 80_000
    waiting = allocate_waiting(models, models * each)
    lengths = np.exp(random.normal([6.0, 5.5], 1.0, (models * each, 2))).astype(int) + 1
    for k, (prompt, output) in enumerate(lengths.tolist()):
        e2e_s = (60.0, 600.0, 3600.0)[k % 7 % 3]
        enqueue(
            waiting,
            k % models,
            0.001 * k + e2e_s,
            0.001 * k,
            0.001 * k + e2e_s,
            k % 7 % 3,
            prompt,
            output,
            -1,
            -1,
            -1,
            -1,
        )
    limits = dict.fromkeys(range(models), 440)
    regroup(waiting, limits)
    used_s = []
    for _ in range(5):
        began_s = time.process_time()
        regroup(waiting, limits)
        used_s.append(time.process_time() - began_s)
    return 1e3 * min(used_s), 1e6 * min(used_s) / (models * each)


def view_ms() -> float:
    """Return the CPU milliseconds to read 1,000 groups on 50 instances for the Queues page; the median of nine."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from controlplane.dispatch.queues.view import QueuesView
    from tests.dispatch.test_reordering import Served

    instances = tuple(range(1, 51))
    served = Served(instances=instances)
    served.apply("qlm", instances, group_batches=0.9)
    while served.dispatcher.queue.group_count < 1000:  # a request each
        served.ask(60.0 + served.number % 12 * 300.0)
    view, used_s = QueuesView(served.dispatcher), []
    for _ in range(10):
        served.now_s += 1.0
        began_s = time.process_time()
        view()
        used_s.append(time.process_time() - began_s)
    return 1e3 * statistics.median(used_s[1:])


def clustering() -> tuple[float, float, float]:
    """Return (milliseconds, purity of classes, purity of models) of clustering the same 400,000 requests by k-means."""
    random = np.random.default_rng(FIRST_SEED)
    models, count = 5, 400_000
    lengths = random.normal([6.0, 5.5], 1.0, (count, 2))
    at = np.arange(count)
    model, due_s = at % models, np.array([60.0, 600.0, 3600.0])[at % 7 % 3]
    columns = np.column_stack([model, np.log(due_s), lengths])
    columns = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    clusters = models * 3 * BUCKETS
    began_s = time.perf_counter()
    from sklearn.cluster import MiniBatchKMeans  # imported here: every test process imports this module

    of = MiniBatchKMeans(clusters, batch_size=8192, max_iter=5, random_state=0, n_init=1).fit_predict(columns)
    wall_s = time.perf_counter() - began_s

    def purity(kinds: np.ndarray) -> float:
        table = np.zeros((clusters, int(kinds.max()) + 1), np.int64)
        np.add.at(table, (of, kinds), 1)
        return float(table.max(axis=1).sum() / count)

    return 1e3 * wall_s, purity(at % 7 % 3), purity(model)


async def timer_p99_ms(problem: Problem | None) -> float:
    """Return the 99th percentile of how late timers of a millisecond fire while *problem* is searched in a thread, or for
    as long without one.
    """
    until_s, late_s = time.perf_counter() + LONG_S, []
    search = asyncio.to_thread(reorder, problem, None, LONG_S, clock=time.thread_time) if problem else asyncio.sleep(0)
    searching = asyncio.ensure_future(search)
    while not searching.done() or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        await asyncio.sleep(0.001)
        late_s.append(time.perf_counter() - began_s - 0.001)
    return 1e3 * float(np.percentile(late_s, 99))


def first_call_s(cache: str | None = None) -> tuple[float, float]:
    """Return wall and processor seconds of the first order in a new process, imports included."""
    environment = os.environ | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=True
    )
    wall_s, cpu_s = done.stdout.split()
    return float(wall_s), float(cpu_s)


def run(options: argparse.Namespace) -> dict[str, Any]:
    warm_up()
    lists: dict[str, list[float]] = {}
    rules: dict[str, dict[str, list[float]]] = {name: {"attainment": [], "lateness_s": []} for name in RULES}

    def note(**values: float) -> None:
        for key, value in values.items():
            lists.setdefault(key, []).append(value)

    for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
        problem = synthetic(50, 1000, 1.0, seed)
        for name in RULES:
            score = evaluate(problem, order_by(name, problem), 0.0)
            rules[name]["attainment"].append(score.attainment)
            rules[name]["lateness_s"].append(score.lateness_s)
        edf_s = rules["edf"]["lateness_s"][-1]
        cold, cold_s, cold_cpu_s = timed(problem, None, COLD_S)
        long, _, _ = timed(problem, None, LONG_S)
        best = best_known(problem, None, options.best_s, cold, long)
        note(
            requests=float(problem.requests.sum()),
            cold_s=cold_s,
            cold_cpu_s=cold_cpu_s,
            cold_attainment=cold.after.attainment,
            cold_lateness_s=cold.after.lateness_s,
            cold_lateness_of_edf=cold.after.lateness_s / edf_s,
            cold_gap=cold.after.objective / best - 1.0,
            gap_1s=long.after.objective / best - 1.0,
            attainment_1s=long.after.attainment,
            lateness_1s_s=long.after.lateness_s,
        )
        later, previous = churned(problem, long.order, seed)
        warm, warm_s, warm_cpu_s = timed(later, previous, WARM_S)
        best = best_known(later, previous, options.best_s, warm)
        note(
            warm_ms=1000 * warm_s,
            warm_cpu_ms=1000 * warm_cpu_s,
            warm_gap=warm.after.objective / best - 1.0,
            inserted_gap=warm.before.objective / best - 1.0,
        )
    large = synthetic(100, 2000, 1.0, FIRST_SEED)
    answer, large_s, _ = timed(large, None, LONG_S - 0.06)
    note(
        large_s=large_s,
        large_attainment=answer.after.attainment,
        large_gap=answer.after.objective / best_known(large, None, 2 * options.best_s, answer) - 1.0,
    )
    calls = [first_call_s() for _ in range(2)]
    note(first_call_s=min(wall_s for wall_s, _ in calls), first_call_cpu_s=min(cpu_s for _, cpu_s in calls))
    group_ms, one_us = grouping()
    note(group_400k_ms=group_ms, group_one_us=one_us, view_1000_ms=view_ms())
    kmeans_ms, class_purity, model_purity = clustering()
    note(kmeans_ms=kmeans_ms, kmeans_class_purity=class_purity, kmeans_model_purity=model_purity)
    note(timer_p99_ms=asyncio.run(timer_p99_ms(large)), timer_alone_p99_ms=asyncio.run(timer_p99_ms(None)))
    if options.compile:
        with tempfile.TemporaryDirectory() as folder:
            note(first_compile_s=first_call_s(folder)[0])
    result: dict[str, Any] = {key: round(statistics.median(values), 4) for key, values in lists.items()}
    result["requests"] = int(result["requests"])
    result["rules"] = {
        name: {key: round(statistics.median(values), 4) for key, values in of.items()} for name, of in rules.items()
    }
    return result
