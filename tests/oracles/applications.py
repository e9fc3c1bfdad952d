"""Plain twins of the kernels of applications."""

import functools
import itertools

import numpy as np


def gittins_rank(service_s, attained_s):
    """Equation 1 of Hermes, word for word, for budgets up to each support point and between them."""
    left = [value for value in service_s if value > attained_s]
    if not left:
        return attained_s
    budgets = sorted({value - attained_s for value in left})
    between = [(a + b) / 2 for a, b in itertools.pairwise(budgets)]
    ratios = []
    for budget in budgets + between:
        spent = np.mean([min(value - attained_s, budget) for value in left])
        finished = np.mean([value - attained_s <= budget for value in left])
        ratios.append(spent / finished if finished else np.inf)
    return min(ratios)


def remaining_s(graph, rates, unit, input_tokens, output_tokens, count, random):
    """Samples of the service from a step with known demands to the end, without correlations."""
    led_to = functools.cache(lambda name, visit: _led_to(graph, name, visit))
    steps_of = functools.cache(lambda name: [step for one in graph.records for step in one.steps if step.unit == name])

    def drawn(name, visit):
        chosen = led_to(name, visit)
        return chosen[random.integers(len(chosen))]

    samples = []
    for _ in range(count):
        rate = rates[unit]
        service = rate.base_s + rate.input_s * input_tokens + rate.output_s * output_tokens
        waiting, visits = [*drawn(unit, 0)], {unit: 1}
        while waiting:
            name = waiting.pop()
            steps = steps_of(name)
            taken, given, parallel = (
                getattr(steps[random.integers(len(steps))], field)
                for field in ("input_tokens", "output_tokens", "parallelism")
            )
            rate = rates[name]
            service += parallel * (rate.base_s + rate.input_s * taken + rate.output_s * given)
            waiting += drawn(name, visits.get(name, 0))
            visits[name] = visits.get(name, 0) + 1
            if visits[name] > 64:
                break
        samples.append(service)
    return np.array(samples)


def _led_to(graph, unit, visit):
    every, same = [], []
    for record in graph.records:
        passes = 0
        for step, led_to in zip(record.steps, record.children(), strict=True):
            if step.unit == unit:
                names = [record.steps[at].unit for at in led_to]
                every.append(names)
                if passes == visit:
                    same.append(names)
                passes += 1
    return same if len(same) >= 8 else every
