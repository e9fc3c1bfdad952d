"""How the cost of an instance is shared among the requests that ran on it."""

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


def held_tokens(prompt_tokens: Seconds, output_tokens: Seconds) -> Seconds:
    """KV tokens that requests hold on average while they run: the prompt, and half of an output that grows evenly."""
    return prompt_tokens + output_tokens / 2


def share(begin_s: Seconds, end_s: Seconds, held: Seconds, paid: list[tuple[float, float]]) -> tuple[Seconds, float]:
    """Share the time of one instance that is paid among its requests by the KV tokens that they hold.

    A slice of time lies between two moments at which a request or a paid period begins or ends. Each slice is shared by
    the KV-token-seconds in it: of a slice of length d, request i of those that run has

        share_i = d x held_i / sum(held_j)

    and where none runs, or none holds a token, the slice is idle.

    Args:
        begin_s: when each request began to run, shape (n,); not after its end.
        end_s: when it ended, shape (n,).
        held: KV tokens that it held meanwhile, shape (n,): whole or half tokens, so that sums of them are exact.
        paid: periods that do not overlap, in seconds, in which the instance cost something.

    Returns:
        Seconds of each request, shape (n,), and seconds that were idle. Their sum is the length of *paid*.
    """
    edges = np.array(paid, dtype=float).reshape(-1, 2)
    moments, index = np.unique(np.concatenate([begin_s, end_s, edges[:, 0], edges[:, 1]]), return_inverse=True)
    if not len(moments):
        return np.zeros(0), 0.0
    begins, ends, froms, untils = np.split(index, np.cumsum([len(begin_s), len(end_s), len(edges)]))

    def within(first: NDArray[np.intp], last: NDArray[np.intp], weights: Seconds) -> Seconds:
        """The sum of *weights* over what lasts through each slice."""
        changes = np.bincount(first, weights, len(moments)) - np.bincount(last, weights, len(moments))
        return np.cumsum(changes)[:-1]

    lengths = np.diff(moments) * within(froms, untils, np.ones(len(edges)))
    total = within(begins, ends, held)
    used = total > 0
    so_far = np.concatenate([[0.0], np.cumsum(np.divide(lengths, total, out=np.zeros_like(lengths), where=used))])
    return held * (so_far[ends] - so_far[begins]), float(lengths[~used].sum())
