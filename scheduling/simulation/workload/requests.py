"""The requests of a simulation, as arrays, and the check that they make sense."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC

CHUNK: Final = 1_000_000  # requests looked at in one go, so that checking ten million takes little memory

MOST_HELD: Final = HELD + OPPORTUNISTIC + ENDS_ON_RECLAIM


class Requests(NamedTuple):
    """One element a request, in order of arrival. A column that is the same for all may be a broadcast scalar."""

    arrival_s: NDArray[np.float64]
    model: NDArray[np.int16]
    """Number of its model in the cluster's list."""
    region: NDArray[np.int16]
    """Where its caller is: number in the cluster's list."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    predicted_tokens: NDArray[np.int32]
    """Output tokens that the dispatcher expects."""
    slo_class: NDArray[np.int16]
    tenant: NDArray[np.int32]
    priority: NDArray[np.int32]
    """Lower is earlier."""
    deadline_s: NDArray[np.float64]
    """After arrival, of the first token; infinity for none."""
    end_s: NDArray[np.float64]
    """After arrival, of the last token: end to end, or a deadline; infinity for none."""
    hold_s: NDArray[np.float64]
    """After arrival, for which it is held while no instance has room (`Cluster.sweeps`); infinity for ever."""
    judged: NDArray[np.int8]
    """1: its promise is judged when it has to wait (`queueing.promises`)."""
    held: NDArray[np.int8]
    """Of classes that are not interactive: `HELD`, `OPPORTUNISTIC` and `ENDS_ON_RECLAIM`, added; 0 for interactive ones."""
    run: NDArray[np.int32]
    """Number of its application run (`workload.runs`), -1 for none; it comes once the steps before it have ended."""
    adapter: NDArray[np.int32]
    """Number of its LoRA adapter, -1 for none."""
    asked: NDArray[np.int16]
    """Number of the name that it asked for (`Cluster.names`) where a rule chose the model that serves it; else -1."""
    prefix_first: NDArray[np.int64]
    """`prefix_hashes[prefix_first[r]:prefix_first[r + 1]]` stand for the leading full blocks of r's prompt, each for all
    tokens up to its end. Empty when no prompts share a prefix."""
    prefix_hashes: NDArray[np.int64]

    @property
    def since_s(self) -> NDArray[np.float64]:
        """Arrival of its work (`control.fleet.RequestTable`)."""
        return self.arrival_s

    @property
    def count(self) -> int:  # type: ignore[override]  # a tuple's own `count` is of no use here
        return int(self.arrival_s.size)


def make_requests(
    arrival_s: ArrayLike,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    model: ArrayLike = 0,
    region: ArrayLike = 0,
    predicted_tokens: ArrayLike | None = None,
    slo_class: ArrayLike = 0,
    tenant: ArrayLike = 0,
    priority: ArrayLike = 0,
    deadline_s: ArrayLike = np.inf,
    end_s: ArrayLike = np.inf,
    hold_s: ArrayLike = np.inf,
    judged: ArrayLike = 0,
    held: ArrayLike = 0,
    run: ArrayLike = -1,
    adapter: ArrayLike = -1,
    asked: ArrayLike = -1,
    prefix_blocks: Sequence[Sequence[int]] | None = None,
) -> Requests:
    """Return requests from arrays or scalars; scalars hold for all and take no memory. *predicted_tokens* default to the
    true ones.

    Raises ValueError naming a column whose length differs, or that does not hold whole numbers.
    """
    arrivals = np.ascontiguousarray(arrival_s, np.float64).reshape(-1)

    def column(name: str, values: ArrayLike, dtype: type[np.generic]) -> NDArray[np.generic]:
        array = np.asarray(values)
        if array.ndim > 1 or (array.ndim == 1 and array.size != arrivals.size):
            raise ValueError(f"{name} has the shape {array.shape}; there are {arrivals.size} requests")
        if array.dtype == dtype or np.issubdtype(dtype, np.floating):
            typed = array.astype(dtype, copy=False)
        else:
            wrong = np.flatnonzero(~np.isfinite(array) | (array != np.trunc(array)))
            if wrong.size:
                raise ValueError(f"{name}[{wrong[0]}] is {array.flat[wrong[0]]}: not a whole number")
            limits = np.iinfo(dtype)  # type: ignore[type-var]
            wrong = np.flatnonzero((array < limits.min) | (array > limits.max))
            if wrong.size:
                raise ValueError(f"{name}[{wrong[0]}] is {array.flat[wrong[0]]}: out of range")
            typed = array.astype(dtype)
        return np.broadcast_to(typed, arrivals.shape) if typed.ndim == 0 else np.ascontiguousarray(typed)

    if prefix_blocks is not None and len(prefix_blocks) != arrivals.size:
        raise ValueError(f"prefix_blocks has {len(prefix_blocks)} elements; there are {arrivals.size} requests")
    blocks = prefix_blocks or []
    first = np.zeros(len(blocks) + 1 if blocks else 0, np.int64)
    if blocks:
        np.cumsum([len(each) for each in blocks], out=first[1:])
    columns = {
        "model": column("model", model, np.int16),
        "region": column("region", region, np.int16),
        "prompt_tokens": column("prompt_tokens", prompt_tokens, np.int32),
        "output_tokens": column("output_tokens", output_tokens, np.int32),
        "slo_class": column("slo_class", slo_class, np.int16),
        "tenant": column("tenant", tenant, np.int32),
        "priority": column("priority", priority, np.int32),
        "deadline_s": column("deadline_s", deadline_s, np.float64),
        "end_s": column("end_s", end_s, np.float64),
        "hold_s": column("hold_s", hold_s, np.float64),
        "judged": column("judged", judged, np.int8),
        "held": column("held", held, np.int8),
        "run": column("run", run, np.int32),
        "adapter": column("adapter", adapter, np.int32),
        "asked": column("asked", asked, np.int16),
    }
    predicted = columns["output_tokens"]
    if predicted_tokens is not None:
        predicted = column("predicted_tokens", predicted_tokens, np.int32)
    return Requests(
        arrival_s=arrivals,
        predicted_tokens=predicted,  # type: ignore[arg-type]
        prefix_first=first,
        prefix_hashes=np.array([number for each in blocks for number in each], np.int64),
        **columns,  # type: ignore[arg-type]
    )


def check_prefixes(requests: Requests, block_sizes_tokens: set[int]) -> None:
    """Raise ValueError for invalid prefix hashes of *requests* where prefixes are cached in blocks of these sizes."""
    first, hashes = requests.prefix_first, requests.prefix_hashes
    count = requests.arrival_s.size
    if not hashes.size or not block_sizes_tokens:
        return
    if first.shape != (count + 1,) or first[0] != 0 or np.any(np.diff(first) < 0) or first[-1] > hashes.size:
        raise ValueError(f"prefix_first must rise from 0 to the number of prefix_hashes, in {count + 1} elements")
    if len(block_sizes_tokens) > 1:
        sizes = " and ".join(str(size) for size in sorted(block_sizes_tokens))
        raise ValueError(f"prefixes are cached in blocks of {sizes} tokens; prefix_hashes stand for blocks of one size")
    size = min(block_sizes_tokens)
    wrong = np.flatnonzero(np.diff(first) > requests.prompt_tokens // size)
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"request {at} has {first[at + 1] - first[at]} prefix hashes; its prompt of {requests.prompt_tokens[at]}"
            f" tokens has {requests.prompt_tokens[at] // size} full blocks"
        )


def check_requests(
    requests: Requests, models: Sequence[str], regions: Sequence[object], longest_tokens: Sequence[int]
) -> None:
    """Raise ValueError naming the column, the first invalid element and its value.

    *longest_tokens*: for each model, prompt and output together that every one of its instances can hold; 0 if it has no
    instance.
    """
    count = requests.arrival_s.size
    for name in Requests._fields:
        if not name.startswith("prefix") and getattr(requests, name).shape != (count,):
            raise ValueError(f"{name} has the shape {getattr(requests, name).shape}; there are {count} requests")
    longest = np.array(longest_tokens, np.int64)
    before_s = 0.0
    for start in range(0, count, CHUNK):
        part = slice(start, min(start + CHUNK, count))

        def refuse(name: str, wrong: NDArray[np.bool_], why: str, start: int = start) -> None:
            at = np.flatnonzero(wrong)
            if at.size:
                index = start + int(at[0])
                raise ValueError(f"{name}[{index}] is {getattr(requests, name)[index]}: {why}")

        arrival_s = requests.arrival_s[part]
        refuse("arrival_s", ~np.isfinite(arrival_s), "not a moment")
        refuse("arrival_s", arrival_s < 0, "before the start, 0")
        refuse("arrival_s", np.diff(arrival_s, prepend=before_s) < 0, "earlier than the one before it: sort by time")
        before_s = float(arrival_s[-1])
        refuse("prompt_tokens", requests.prompt_tokens[part] < 1, "a prompt has at least 1 token")
        refuse("output_tokens", requests.output_tokens[part] < 1, "a request produces at least 1 token")
        refuse("predicted_tokens", requests.predicted_tokens[part] < 1, "a request produces at least 1 token")
        refuse("deadline_s", ~(requests.deadline_s[part] > 0), "a deadline is after arrival")
        refuse("end_s", ~(requests.end_s[part] > 0), "an end is after arrival")
        refuse("hold_s", ~(requests.hold_s[part] >= 0), "a time is not below 0")
        refuse("adapter", requests.adapter[part] < -1, "it is a number from 0 up, or -1 for none")
        refuse("held", (requests.held[part] < 0) | (requests.held[part] > MOST_HELD), f"it is from 0 to {MOST_HELD}")
        model, region = requests.model[part], requests.region[part]
        refuse("model", (model < 0) | (model >= len(models)), f"there are {len(models)} models")
        refuse("region", (region < 0) | (region >= len(regions)), f"there are {len(regions)} regions")
        most = longest[model]
        for number in np.unique(model[most == 0])[:1]:
            refuse("model", model == number, f"{models[number]} has no instance")
        tokens = requests.prompt_tokens[part].astype(np.int64) + requests.output_tokens[part]
        at = np.flatnonzero(tokens > most)
        if at.size:
            name, limit = models[model[at[0]]], most[at[0]]
            raise ValueError(
                f"request {start + int(at[0])} has {tokens[at[0]]} tokens, prompt and output together;"
                f" instances of {name} hold at most {limit}"
            )


def follow(first: Requests, later: Requests) -> Requests:
    """Return *first* followed by *later*, which all came after them."""
    columns = {
        name: np.concatenate([getattr(first, name), getattr(later, name)])
        for name in Requests._fields
        if not name.startswith("prefix")
    }
    prefixes = first.prefix_first.size > 0 or later.prefix_first.size > 0
    starts = np.zeros(0, np.int64)
    if prefixes:
        counts = [
            np.diff(each.prefix_first) if each.prefix_first.size else np.zeros(each.count, np.int64)
            for each in (first, later)
        ]
        starts = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)
    hashes = np.concatenate([first.prefix_hashes, later.prefix_hashes])
    return Requests(**columns, prefix_first=starts, prefix_hashes=hashes)
