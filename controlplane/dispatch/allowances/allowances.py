"""Limits and budgets of all relays' requests and of runs, counted by one process: the first dispatcher.

A relay sends `Enter` before a request waits for an instance, and `Leave` at its end. A process that becomes the first
dispatcher knows of no open request: it reads the budgets' rows and the ledger, and waits for what the relays hold
(`Enter.held`). Until then it answers nobody, so no limit is exceeded meanwhile.
"""

from collections.abc import Callable

from msgspec import Struct

from controlplane.dispatch import port
from controlplane.dispatch.allowances.budgets import WINDOW_S, BudgetHold, Budgets
from controlplane.dispatch.allowances.limits import Exceeded, Limits
from controlplane.dispatch.allowances.runs import RunAllowances, RunHold


class Held(Struct, eq=False):
    """What an open request holds. *left_s*: when its relay was given up; None: it was not."""

    enter: port.Enter
    hold: BudgetHold
    run: RunHold | None
    left_s: float | None = None


class Allowances:
    """*term*: the epoch for which this process is the first dispatcher, 0 while it is not. *registered*: whether relays have
    sent what they hold since its begin.
    """

    def __init__(
        self,
        budgets: Budgets,
        deliver: Callable[[port.OfAllowances], None],
        term: Callable[[], int],
        registered: Callable[[], bool] = lambda: True,
    ) -> None:
        self.limits, self.budgets, self.runs = Limits(), budgets, RunAllowances()
        self.deliver, self.term, self.registered = deliver, term, registered
        self._held: dict[int, Held] = {}
        self._left: dict[int, Held] = {}
        """Of relays that were given up in the last minute; they may come back."""
        self._term = 0
        self.ready = False
        self._waiting: list[port.ForAllowances] = []
        """For this process to be ready; where another one becomes the first dispatcher, relays ask that."""
        self._spent: set[int] = set()

    def take(self, record: port.ForAllowances) -> None:
        """Act on a record of a relay; what it asks is answered before this returns, or once this process is ready, and the
        first dispatcher.
        """
        term = self.term()
        if term not in (0, self._term):
            self._begin(term)
        if self.ready and (term or (isinstance(record, port.Leave) and not self._waiting)):  # never before its `Enter`
            self._answer_waiting()
            self._answer(record)
        else:
            self._waiting.append(record)

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for record in sorted(waiting, key=lambda each: not (isinstance(each, port.Enter) and each.held)):
            self._answer(record)

    def _answer(self, record: port.ForAllowances) -> None:
        match record:
            case port.Enter():
                self._enter(record)
            case port.Leave():
                self._leave(record)
            case port.LoadWanted():
                self.deliver(port.Load(record.number, self.limits.sequences(record.tenant_id)))

    def forget(self, relay: int) -> None:
        """Give up a relay that is silent: its requests are open no longer, and what they used is counted as predicted."""
        self._waiting = [each for each in self._waiting if port.relay_of(each.number) != relay]
        for number in [each for each in self._held if port.relay_of(each) == relay]:
            held = self._left[number] = self._held.pop(number)
            held.left_s = self.budgets.clock()
            held.hold.reserve(False)
            self._leave_limits(held.enter, held.enter.tokens, held.enter.sequences)

    async def refresh(self) -> None:
        """Read the budgets' rows again, and write what was reached: every second. Raises what the database raises."""
        term, now_s = self.term(), self.budgets.clock()
        if not term:
            return
        if term != self._term:
            self._begin(term)
        if not self.ready:
            self.budgets.forget()
        registered = self.registered()
        begins = registered and not self.ready
        await self.budgets.read()
        terms = await self.runs.load(begins)
        if term != self.term():  # it ended meanwhile
            return
        if begins:
            self.runs.begin(terms)
        self.runs.terms = terms
        if registered:
            self.ready = True
            self._answer_waiting()
        for number in [number for number, each in self._left.items() if now_s - (each.left_s or 0.0) > WINDOW_S]:
            if (run := self._left.pop(number).run) is not None:
                run.end(run.amount)
        self._send_spent()
        await self.budgets.note()

    def _begin(self, term: int) -> None:
        self._term, self.ready = term, False
        self.limits = Limits()
        self._held, self._left, self._waiting = {}, {}, []

    def _enter(self, enter: port.Enter) -> None:
        number = enter.number
        if (left := self._left.pop(number, None)) is not None:  # its relay is back
            if enter.held:
                self._held[number], left.left_s = left, None
                left.hold.reserve(True)
                self._enter_limits(enter, 0)
            else:
                left.hold.cancel()
                if left.run is not None:
                    left.run.end()
                self._leave_limits(enter, 0, sequences=0)
        held = self._held.get(number)
        if held is None:
            try:
                held = self._held[number] = self._hold(enter)
            except Exceeded as error:
                self.deliver(
                    port.NotEntered(
                        number, 429, error.code, error.message, error.retry_after_s, error.type, error.headers
                    )
                )
                return
        if not enter.held:
            self.deliver(port.Entered(number, tuple(held.hold.warnings)))

    def _hold(self, enter: port.Enter) -> Held:
        count, hold, run = self.budgets.hold if enter.held else self.budgets.enter, None, self.runs.enter(enter)
        try:
            hold = count(enter.tenant_id, enter.key_id, enter.model, enter.tokens, rates=enter.rates)
            self._enter_limits(enter, enter.tokens)
        except Exceeded:
            if hold is not None:
                hold.cancel()
            if run is not None:
                run.end()
            raise
        return Held(enter, hold, run)

    def _enter_limits(self, enter: port.Enter, tokens: int) -> None:
        if enter.rates:
            self.limits.enter(
                enter.tenant_id,
                self.budgets.clock(),
                max_concurrent=enter.max_concurrent,
                tokens_per_minute=enter.tokens_per_minute,
                tokens=tokens,
                sequences=enter.sequences,
                held=enter.held,
            )

    def _leave(self, leave: port.Leave) -> None:
        """Count the tokens that a request used in place of those that were predicted."""
        held = self._held.pop(leave.number, None) or self._left.pop(leave.number, None)
        if held is None:
            return
        enter, hold = held.enter, held.hold
        if leave.model:
            hold.cancel()
            hold = self.budgets.hold(enter.tenant_id, enter.key_id, leave.model, enter.tokens, rates=enter.rates)
        hold.settle(leave.tokens)
        if held.run is not None:
            held.run.end(self.runs.amount(enter.tenant_id, leave.model or enter.model, leave.tokens))
        self._leave_limits(enter, leave.tokens, 0 if held.left_s is not None else enter.sequences)
        if any(use.terms.pk not in self._spent and self.budgets.is_spent(use) for use, _ in hold.held):
            self._send_spent()

    def _leave_limits(self, enter: port.Enter, used: int, sequences: int) -> None:
        if enter.rates:
            self.limits.leave(
                enter.tenant_id,
                tokens_per_minute=enter.tokens_per_minute,
                predicted=enter.tokens,
                used=used,
                sequences=sequences,
            )

    def _send_spent(self) -> None:
        spent = self.budgets.spent()
        self._spent = {terms.pk for terms in spent}
        self.deliver(port.Spent(tuple((terms.tenant_id, terms.key_id, terms.model) for terms in spent)))
