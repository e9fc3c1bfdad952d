"""Limits of application runs: the tokens and the dollars that all calls of one run may use.

A call holds its prompt and `max_tokens`, or without these its predicted output, from before it waits until its end, so that
branches cannot pass the limit together; then what it used counts. A run passes its limit by no more than calls without
`max_tokens` exceed their predictions, and prompts theirs. The first dispatcher counts the calls of all shards.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from controlplane.dispatch.allowances.limits import Exceeded
from controlplane.dispatch.port import Enter

MOST_RUNS: Final = 100_000
"""Runs whose use is known; beyond that the one without a call for longest is forgotten."""
SHARE: Final = 1e-9
"""Of a limit that sums of dollars may be off."""


class Amount(NamedTuple):
    """What calls use, or a run may."""

    tokens: float = 0.0
    usd: float = 0.0

    def and_(self, other: "Amount", sign: int = 1) -> "Amount":
        return Amount(self.tokens + sign * other.tokens, self.usd + sign * other.usd)


NOTHING: Final = Amount()
UNLIMITED: Final = Amount(math.inf, math.inf)
RunKey = tuple[int, str, str]
"""Tenant id, application and run."""


class RunTerms(NamedTuple):
    """What the database says of runs."""

    limits: Mapping[tuple[int, str], Amount] = {}
    """By tenant id and application."""
    usd_per_token: Mapping[tuple[int, str], float] = {}
    """By tenant id and model; of tenant 0 and model "", the fleet's mean."""
    used: Mapping[RunKey, Mapping[str, int]] = {}
    """Tokens of runs in progress by model, where asked for."""


class RunUse(Struct):
    done: Amount = NOTHING
    held: Amount = NOTHING


class RunHold(NamedTuple):
    """What an open call holds of its run."""

    use: RunUse
    amount: Amount

    def end(self, used: Amount = NOTHING) -> None:
        """Count what was *used* instead; nothing, of a call that was not admitted after all."""
        self.use.held = self.use.held.and_(self.amount, -1)
        self.use.done = self.use.done.and_(used)


async def _no_terms(begins: bool) -> RunTerms:
    return RunTerms()


class RunAllowances:
    """Uses of all runs. *load* reads the terms; with True also what runs in progress have used."""

    def __init__(self, load: Callable[[bool], Awaitable[RunTerms]] = _no_terms) -> None:
        self.load = load
        self.terms = RunTerms()
        self._uses: OrderedDict[RunKey, RunUse] = OrderedDict()

    def begin(self, terms: RunTerms) -> None:
        """Begin to count from what *terms* say that runs have used."""
        self.terms, self._uses = terms, OrderedDict()
        for key, tokens in terms.used.items():
            use = self._use(key)
            for model, count in tokens.items():
                use.done = use.done.and_(self.amount(key[0], model, count))

    def amount(self, tenant_id: int, model: str, tokens: float) -> Amount:
        known = self.terms.usd_per_token
        each = known.get((tenant_id, model), known.get((0, model), known.get((0, ""), 0.0)))
        return Amount(tokens, tokens * each)

    def enter(self, enter: Enter) -> RunHold | None:
        """Hold what a call of a run may use. Raises Exceeded where that does not fit, unless another had held it before."""
        if not (enter.application and enter.run):
            return None
        use = self._use((enter.tenant_id, enter.application, enter.run))
        amount = self.amount(enter.tenant_id, enter.model, enter.run_tokens)
        if not enter.held:
            self._check(enter, use, amount)
        use.held = use.held.and_(amount)
        return RunHold(use, amount)

    def _use(self, key: RunKey) -> RunUse:
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = RunUse()
            if len(self._uses) > MOST_RUNS:
                oldest = next((each for each, one in self._uses.items() if not one.held.tokens), key)
                del self._uses[oldest]
        self._uses.move_to_end(key)
        return use

    def _check(self, enter: Enter, use: RunUse, amount: Amount) -> None:
        allowed = self.terms.limits.get((enter.tenant_id, enter.application), UNLIMITED)
        asked = (enter.run_max_tokens, enter.run_max_usd)
        for show, of, done, held, own, most in zip(
            (_tokens, _usd), asked, use.done, use.held, amount, allowed, strict=True
        ):
            limit = min(most, math.inf if of is None else of)
            if done + held + own <= limit * (1.0 + SHARE):
                continue
            text = (
                f"The run {enter.run!r} of {enter.application!r} may use {show(limit)}. It has used {show(done)}, its open"
                f" calls hold {show(held)}, and this one needs up to {show(own)} (prompt and max_tokens, else its predicted"
                " output). "
            )
            if held > 0.0 and done + own <= limit:
                raise Exceeded(f"{text}Try again when one has ended.", code="run_limit_held", retry_after_s=1.0)
            text += "A later call fits only if it needs less."
            raise Exceeded(text, code="run_limit_reached", type="insufficient_quota")


def _tokens(count: float) -> str:
    return f"{count:,.0f} tokens"


def _usd(amount: float) -> str:
    return f"${amount:,.4f}"
