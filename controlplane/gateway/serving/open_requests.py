"""The requests that this process carries, as the dispatcher knows them: each by its number, by records alone.

Decisions of the dispatcher are written to their `Progress`, whose task waits for them. Tokens of streams are counted there
and reported together, ten times a second.
"""

import asyncio
from collections.abc import Callable, Collection
from itertools import count

from msgspec import structs

from controlplane.dispatch import port
from controlplane.gateway.errors import ApiError
from controlplane.gateway.progress import Interrupt, Progress, RequestState
from controlplane.gateway.serving.http import Responder
from controlplane.gateway.upstream.answers import InstanceLost, Usage

AT_INSTANCE = (RequestState.PLACED, RequestState.STREAMING)


class OpenRequests:
    """Open requests by number. *send* takes the records for the dispatcher, *relay* is the number of this relay."""

    def __init__(self, clock: Callable[[], float], send: port.Send, relay: int = 0) -> None:
        self.clock = clock
        self.streaming: set[Progress] = set()
        self._open: dict[int, Progress] = {}
        self._numbers = count(relay << port.RELAY_BITS)
        self.send = send

    def next_number(self) -> int:
        return next(self._numbers)

    # To the dispatcher

    def submit(self, progress: Progress) -> None:
        """Have *progress* queued and placed; `Progress.placement` resolves to the placement, or to its ApiError."""
        self._open[progress.asked.number] = progress
        progress.placement = asyncio.get_running_loop().create_future()
        self.send(progress.asked)

    def place_again(self, progress: Progress, lost: InstanceLost | None = None) -> None:
        """Return *progress* to the dispatcher: it *lost* its instance, or was evicted, and can start over or be resumed."""
        if lost is None:
            progress.evictions += 1
            progress.steps[-1]["evicted"] = {"tokens_seen": progress.output_tokens}
        else:
            progress.busy = lost.error or progress.busy
            progress.steps[-1]["lost"] = str(lost)
        progress.start_over()
        self.streaming.discard(progress)
        progress.placement = asyncio.get_running_loop().create_future()
        number, kept_tokens = progress.asked.number, progress.output_tokens
        if lost is None:
            self.send(port.Left(number, again=True, evicted=True, kept_tokens=kept_tokens))
        else:
            self.send(port.Left(number, True, lost.failure, str(lost), lost.wait_s, kept_tokens=kept_tokens))

    def opened(self) -> list[port.Open]:
        """Return what is open, for a dispatcher that knows nothing of it: what has its place, then the rest in its order."""
        # Of one that is done its client is being told.
        opened = [_opened(one) for one in self._open.values() if one.state < RequestState.DONE]
        return sorted(opened, key=lambda one: one.placed is None)

    def at_instances(self) -> frozenset[str]:
        """Return the ids of the requests that an instance was given."""
        return frozenset(one.asked.request_id for one in self._open.values() if one.state in AT_INSTANCE)

    def key_ids(self) -> set[int]:
        """Return the ids of the keys with open requests."""
        return {progress.grant.key_id for progress in self._open.values()}

    def end_keys(self, key_ids: Collection[int]) -> None:
        """End the requests of keys that may no longer be used, wherever they are."""
        for progress in list(self._open.values()):
            if progress.grant.key_id in key_ids:
                progress.interrupt(Interrupt.KEY_ENDED)

    def stand_by(self) -> None:
        """End what no instance has: this process places nothing any longer."""
        for progress in list(self._open.values()):
            if progress.placement is not None and not progress.placement.done():
                progress.interrupt(Interrupt.STANDING_BY)

    def headers_received(self, progress: Progress) -> None:
        """Record that the instance of *progress* begins to answer."""
        self.send(port.Advanced(headers=((progress.asked.number, self.clock() - progress.placed_s),)))

    def began(self, progress: Progress) -> None:
        """Record the first token of its instance: the prompt is prefilled."""
        progress.move(RequestState.STREAMING)
        progress.first_token_s = progress.first_token_s or self.clock()
        progress.first_token_heard = True
        self.streaming.add(progress)

    def answered_whole(self, progress: Progress, first_token_s: float | None) -> None:
        """Record a whole answer, with the time to its first token if the instance reported it."""
        now_s = self.clock()
        progress.move(RequestState.STREAMING)
        progress.first_token_heard = first_token_s is not None
        progress.first_token_s = now_s if first_token_s is None else min(progress.placed_s + first_token_s, now_s)

    def report(self) -> None:
        """Report the tokens of every stream. Call some ten times a second."""
        moved = []
        for progress in self.streaming:
            if progress.output_tokens != progress.reported_tokens:
                progress.reported_tokens = progress.output_tokens
                moved.append((progress.asked.number, progress.output_tokens))
        if moved:
            self.send(port.Advanced(tuple(moved)))

    def last_heard(self) -> dict[int, float]:
        """Report everything received; return when each stream was last heard from, by number, on the clock."""
        self.report()
        return {
            progress.asked.number: progress.connection.heard_s
            for progress in self.streaming
            if progress.connection is not None
        }

    async def placed(self, progress: Progress, responder: Responder) -> port.Placed:
        """Wait for an instance, and meanwhile ping the tenant of a stream. Raises the ApiError of a refusal."""
        placement = progress.placement
        assert placement is not None
        while progress.asked.streamed and not placement.done():
            await asyncio.wait({placement}, timeout=responder.ping_in_s)
            await responder.ping_if_silent()
        return await placement

    def finished(self, progress: Progress, usage: Usage) -> None:
        """Record that *progress* was answered completely."""
        if usage.output_tokens is not None:
            progress.output_tokens = usage.output_tokens
        progress.cached_tokens = usage.cached_tokens
        if self._close(progress):
            tokens = progress.output_tokens if progress.call.kind.generates else progress.asked.sequences
            self.send(port.Finished(progress.asked.number, tokens))
        progress.move(RequestState.DONE)

    def leave(self, progress: Progress, failure: str = "", reason: str = "") -> None:
        """End *progress* before it is answered. Does nothing to one that was closed, or never submitted."""
        if self._close(progress):
            failed = progress.adapter_failed
            self.send(port.Left(progress.asked.number, failure=failure, reason=reason, adapter_failed=failed))

    def _close(self, progress: Progress) -> bool:
        self.streaming.discard(progress)
        placement = progress.placement
        if placement is not None and placement.done() and not placement.cancelled():
            placement.exception()  # retrieved here: its task may have left before
        return self._open.pop(progress.asked.number, None) is not None

    # From the dispatcher

    def on_event(self, record: port.OfRequest) -> None:
        """Write a decision to its progress. Ignored for a request that has left meanwhile, whose place is given back."""
        progress = self._open.get(record.number)
        if progress is None or progress.state >= RequestState.DONE:
            if isinstance(record, port.Placed):  # once the dispatcher is done with what it decides
                asyncio.get_running_loop().call_soon(self.send, port.Left(record.number))
            return
        placement = progress.placement
        match record:
            case port.Placed():
                progress.placed(record)
                if placement is not None and not placement.done():
                    placement.set_result(record)
            case port.Held():
                progress.queued(record)
                progress.caller_region = record.own_region or progress.caller_region
                progress.steps.append({"held": record.why})
                if progress.state is not RequestState.WAITING:  # else it was degraded to a held class, or is held again
                    progress.move(RequestState.WAITING)
            case port.Rerouted():
                progress.queued(record)
                progress.steps.append({"moved": f"{record.came_from} to {record.region}", "pressure": record.pressure})
            case port.Queued():
                progress.queued(record)
                progress.caller_region = record.own_region or progress.caller_region
                if record.released is not None:
                    progress.released_s = self.clock()
                    progress.asked = structs.replace(progress.asked, priority=record.released["priority"])
                    progress.steps.append({"released": record.released})
                else:
                    if progress.state is not RequestState.WAITING:  # else another dispatcher had queued it
                        progress.move(RequestState.WAITING)
                    if progress.queue_position is None:  # `Waiting` comes if it does wait
                        progress.queue_position, progress.estimated_wait_s, progress.estimated_wait_p99_s = 0, 0.0, 0.0
            case port.Forward():
                progress.forward(record, self.clock())
                self.send(progress.asked if progress.state is RequestState.ACCEPTED else _opened(progress))
            case port.FellBack():
                progress.fall_back(record)
            case port.Waiting():
                progress.queue_position = record.position
                progress.estimated_wait_s = record.estimated_wait_s
                progress.estimated_wait_p99_s = record.estimated_wait_p99_s
            case port.Admission():
                progress.degrade(record)
            case port.Refused():
                progress.region = record.region or progress.region
                progress.caller_region = record.own_region or progress.caller_region
                if placement is not None and not placement.done():
                    busy = progress.busy if record.code == port.INSTANCES_BUSY else None
                    placement.set_exception(busy or _as_error(record))
            case port.Evict():
                progress.evict()
            case port.Lost():
                ends = Interrupt.STOPPED if record.stopped else Interrupt.RECLAIMED if record.reclaimed else None
                there = placement is not None and placement.done()  # else it has left (`place_again`)
                if record.stopped or (there and record.attempt == progress.attempts):
                    progress.interrupt(ends or Interrupt.INSTANCE_LOST)


def _opened(one: Progress) -> port.Open:
    released = one.released_s > 0
    counts = one.output_tokens, one.kept_tokens, one.attempts, one.evictions
    return port.Open(one.asked, _where(one), *counts, released=released)


def _where(progress: Progress) -> port.Placed | None:
    """Return where *progress* was placed, if it is there still."""
    placement = progress.placement
    if progress.state not in AT_INSTANCE or placement is None or not placement.done():
        return None
    return None if placement.cancelled() or placement.exception() else placement.result()


def _as_error(refused: port.Refused) -> ApiError:
    return ApiError(
        refused.status,
        refused.message,
        code=refused.code,
        retry_after_s=refused.retry_after_s,
        estimated_wait_s=refused.estimated_wait_s,
        earliest_at=refused.earliest_at,
    )
