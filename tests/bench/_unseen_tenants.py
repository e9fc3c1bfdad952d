"""Error of predicted lengths for a tenant that nothing was learned of, over its first requests, in tokens.

One tenant at a time is left out: the corrections (`forecasting.lengths.online`) first learn from requests of the others,
then predict and learn those of this one, in random order. The shipped trees were fitted to arena_bench_v1 and
gpteacher, without their names. The constants of the corrections were chosen on the first three sets; the others judge.
`histogram` is the median of the class, then of the (model, tenant), that a prediction starts from; `raw` the model alone,
`calibrated` the model corrected by the tenant's requests, `served` both, by the weight that the model has earned.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.experiments.shipped_lengths import CONVERSATIONS, read_conversations
from forecasting.lengths import Sample, bundled
from forecasting.lengths.datasets import FREE, UNSEEN_SHARE, in_test, read_sets
from forecasting.lengths.online import Online

CHOSEN_ON = ("alpaca_eval", "arena_bench_v1", "gpteacher")
FIRST = (1, 10, 50, 200, 1000)
METHODS = ("histogram", "raw", "calibrated", "served")
SEEDS, OTHERS, MOST_OF_A_TENANT, MOST_OF_A_MODEL = 3, 600, 4_000, 400

Drawn = list[tuple[Sample, float, list[float]]]
"""Samples with the trees' tokens and quantiles."""


def _drawn(data: Path) -> dict[str, Drawn]:
    kept = [s for s in read_sets(data).test if s.query.tenant not in FREE or in_test(s.query.text, UNSEEN_SHARE)]
    kept += [sample for one in read_conversations(data / CONVERSATIONS) for sample in one]
    model, by_tenant, of_model = bundled(), defaultdict[str, Drawn](list), defaultdict[tuple[str, str], int](int)
    for at in np.random.default_rng(0).permutation(len(kept)):
        query = kept[at].query
        of_model[query.tenant, query.model] += 1
        within = of_model[query.tenant, query.model] <= MOST_OF_A_MODEL
        if within and len(by_tenant[query.tenant]) < MOST_OF_A_TENANT:
            tokens, quantiles = model.predict_one(query)
            by_tenant[query.tenant].append((kept[at], tokens, quantiles.tolist()))
    return by_tenant


def _errors(by_tenant: dict[str, Drawn], left_out: str, seed: int) -> Any:
    """Return the absolute errors by each of `METHODS`, a row for each request."""
    dice, online, rows = np.random.default_rng(seed), Online(bundled()), []
    others = [one for tenant, drawn in by_tenant.items() if tenant != left_out for one in drawn]
    mine = by_tenant[left_out]
    stream = [others[at] for at in dice.permutation(len(others))[:OTHERS]]
    for sample, tokens, quantiles in [*stream, *(mine[at] for at in dice.permutation(len(mine))[: FIRST[-1]])]:
        corrected = online.correct(sample.query, tokens, quantiles)
        if sample.query.tenant == left_out:
            predicted = np.array([corrected.usual, tokens, corrected.calibrated, corrected.tokens])
            rows.append(np.abs(predicted - sample.output_tokens))
        online.learn(sample.query, corrected, sample.output_tokens)
    return np.array(rows)


def measured(data: Path) -> dict[str, Any]:
    by_tenant = _drawn(data)
    result: dict[str, Any] = {}
    for tenant in sorted(by_tenant, key=lambda name: name not in CHOSEN_ON):
        runs = [_errors(by_tenant, tenant, seed) for seed in range(SEEDS)]
        part = "chosen on" if tenant in CHOSEN_ON else "judged on"
        for first in FIRST:
            mae = np.mean([rows[:first].mean(axis=0) for rows in runs], axis=0).round(1)
            result[f"{part} {tenant}, first {first}"] = dict(zip(METHODS, mae.tolist(), strict=True))
    return result
