"""What the requests of this process hold of limits and budgets, which the first dispatcher counts: by records alone."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from msgspec import structs

from controlplane.dispatch import port
from controlplane.gateway.errors import KEY_ENDED, ApiError, unavailable
from controlplane.gateway.progress import Progress

ENTER_S = 30.0
"""Longest wait for a first dispatcher, where `X-Max-Wait` does not say less. A takeover ends within a third of it."""
Answer = port.Entered | port.NotEntered | port.Load
NOT_COUNTED = unavailable(
    "Limits and budgets cannot be checked at this moment.", code="limits_unavailable", retry_after_s=1
)


class Entries:
    """*send* takes the records for the first dispatcher. *next_number* makes numbers that no request has."""

    def __init__(self, send: Callable[[port.ForAllowances], None], next_number: Callable[[], int]) -> None:
        self.send, self.next_number = send, next_number
        self._entered: dict[int, port.Enter] = {}
        self._asked: dict[int, tuple[port.Enter | port.LoadWanted, asyncio.Future[Answer]]] = {}
        self._spent = port.Spent(())

    def enter(self, progress: Progress) -> Awaitable[None] | None:
        """Count *progress* towards its budgets and its tenant's limits; wait for what is returned, unless it is None.

        Both raise ApiError: 429, or 503 where no dispatcher answers in time; then nothing is counted.
        """
        asked, grant = progress.asked, progress.grant
        enter = port.Enter(
            asked.number,
            asked.tenant_id,
            asked.api_key_id,
            asked.model,
            progress.expected_tokens,
            asked.sequences,
            grant.max_concurrent_requests,
            grant.tokens_per_minute,
            grant.rates,
            asked.application,
            asked.run,
            progress.most_tokens,
            *progress.run_limits,
        )
        answer = self._ask(enter)
        if not answer.done():
            return self._wait_to_enter(progress, answer)
        _enter(progress, answer.result())  # by a dispatcher of this process
        return None

    async def _wait_to_enter(self, progress: Progress, answer: asyncio.Future[Answer]) -> None:
        most_s = ENTER_S if progress.asked.max_wait_s is None else min(ENTER_S, progress.asked.max_wait_s)
        _enter(progress, await self._answer(answer, most_s))

    def leave(self, progress: Progress) -> None:
        """Count the tokens that *progress* used in place of those that were predicted. Nothing for one that was refused."""
        number = progress.asked.number
        if self._entered.pop(number, None) is None and self._asked.pop(number, None) is None:
            return
        used = progress.prompt_tokens + progress.output_tokens
        self.send(port.Leave(number, used, progress.asked.model if progress.fell_back else ""))

    def spent(self, tenant_id: int, key_id: int, model: str) -> bool:
        """Whether a budget of dollars stops requests of this key for *model*, as the first dispatcher said last."""
        return any(
            tenant in (None, tenant_id) and key in (None, key_id) and name in ("", model)
            for tenant, key, name in self._spent.scopes
        )

    async def sequences(self, tenant_id: int) -> int:
        """Return the open sequences of a tenant. Raises ApiError 503 where no dispatcher answers in time."""
        wanted = port.LoadWanted(self.next_number(), tenant_id)
        try:
            answer = await self._answer(self._ask(wanted), ENTER_S)
        finally:
            self._asked.pop(wanted.number, None)
        assert isinstance(answer, port.Load)
        return answer.sequences

    def _ask(self, record: port.Enter | port.LoadWanted) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[record.number] = record, answer
        self.send(record)
        return answer

    @staticmethod
    async def _answer(answer: asyncio.Future[Answer], most_s: float) -> Answer:
        try:
            async with asyncio.timeout(most_s):
                return await answer
        except TimeoutError:
            raise NOT_COUNTED from None

    def key_ids(self) -> set[int]:
        """Return the ids of the keys of requests that wait to enter."""
        return {record.key_id for record, _ in self._asked.values() if isinstance(record, port.Enter)}

    def end_keys(self, key_ids: Collection[int]) -> None:
        """Refuse the requests that wait to enter of keys that may no longer be used."""
        for record, answer in self._asked.values():
            if isinstance(record, port.Enter) and record.key_id in key_ids and not answer.done():
                answer.set_exception(KEY_ENDED)

    def opened(self) -> list[port.Enter | port.LoadWanted]:
        """Return all that is open, for a first dispatcher that may know nothing of it: another one, or the same again."""
        held = [structs.replace(enter, held=True) for enter in self._entered.values()]
        return [*held, *(record for record, _ in self._asked.values())]

    def on_event(self, record: port.OfAllowances) -> None:
        """Act on a record of the first dispatcher. Ignored for a request that has left meanwhile."""
        if isinstance(record, port.Spent):
            self._spent = record
            return
        if (waiting := self._asked.pop(record.number, None)) is None:
            return
        asked, answer = waiting
        if isinstance(record, port.Entered) and isinstance(asked, port.Enter):
            self._entered[record.number] = asked
        if not answer.done():  # else its task is being cancelled
            answer.set_result(record)


def _enter(progress: Progress, answer: Answer) -> None:
    if isinstance(answer, port.NotEntered):
        raise _as_error(answer)
    if isinstance(answer, port.Entered):
        progress.budget_warnings = answer.warnings


def _as_error(record: port.NotEntered) -> ApiError:
    return ApiError(
        record.status,
        record.message,
        code=record.code,
        type=record.kind,
        retry_after_s=record.retry_after_s,
        headers=record.headers,
    )
