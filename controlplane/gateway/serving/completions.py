"""The road of a request, from its headers to its ledger row: a chat, and every other call that instances answer.

Decisions come from the dispatcher as records (`controlplane.dispatch.port`), through `OpenRequests`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from controlplane.dispatch.port import ERROR
from controlplane.gateway.admission.admitting import Admitter
from controlplane.gateway.admission.keys import Grant, Keys
from controlplane.gateway.admission.pace import LoopLoad, Pace
from controlplane.gateway.admission.validation import ANTHROPIC, SPEECH, Call, Kind
from controlplane.gateway.errors import JSON_TYPE, KEY_ENDED, STANDING_BY, STOPPING, ApiError
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.progress import Interrupt, Progress, RequestState
from controlplane.gateway.serving.http import HttpRequest, Responder
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.upstream.answers import (
    Evicted,
    InstanceLost,
    Interrupted,
    RefusedByInstance,
    Usage,
    reclaimed,
    run_stopped,
)
from controlplane.gateway.upstream.client import Upstream

ENDS: dict[Interrupt | None, ApiError] = {
    Interrupt.KEY_ENDED: KEY_ENDED,
    Interrupt.STANDING_BY: STANDING_BY,
    Interrupt.RECLAIMED: reclaimed(),
    Interrupt.STOPPED: run_stopped(),
}
"""Answers to requests that were interrupted, of the last two to those that their instance had not been sent."""


@dataclass(eq=False)
class Completions:
    """*serves*: whether this process takes requests. Bodies have at most *most_bytes* without media, and *most_body_bytes*
    with them; their JSON is at most *max_depth* deep.
    """

    keys: Keys
    admission: Admitter
    requests: OpenRequests
    upstream: Upstream
    records: Records
    serves: Callable[[], bool]
    max_depth: int
    most_bytes: int
    most_body_bytes: int
    pace: Pace = field(default_factory=Pace)
    load: LoopLoad = field(default_factory=LoopLoad)

    async def answer(self, http: HttpRequest, responder: Responder, kind: Kind) -> None:
        """Answer *http*, a call of *kind*. Raises the ApiError that is the tenant's answer."""
        responder.anthropic = kind in ANTHROPIC
        http.require("POST")
        await self.keys.check(http.authorization)
        if not self.serves():
            raise STANDING_BY
        if (wait := self.pace.enter()) is not None:
            await wait
        raw = await http.body(self.most_body_bytes)
        grant = await self.keys.check(http.authorization)  # the body may have taken minutes
        await self.complete(grant, raw, http, responder, kind)

    async def complete(
        self, grant: Grant, raw: bytes, http: HttpRequest, responder: Responder, kind: Kind, age_s: float = 0.0
    ) -> None:
        """Answer the body *raw*. Raises the ApiError that is the tenant's answer. *age_s*: since its work was accepted."""
        content_type = http.headers.get(b"content-type", b"") if kind in SPEECH else JSON_TYPE[1]
        call = Call.read(raw, kind, max_depth=self.max_depth, most_bytes=self.most_bytes, content_type=content_type)
        progress = await self.admission.admit(grant, call, http, age_s)
        self.records.arrived(progress)
        responder.more_headers, responder.stream = progress.wait_headers, call.stream
        if call.stream and kind is Kind.RESPONSE:
            responder.sequence_number = 0
        with contextlib.ExitStack() as ends:  # in reverse order, each whatever another raises
            ends.callback(self.admission.entries.leave, progress)
            ends.callback(lambda: self.records.close(progress, responder.status))
            ends.callback(self.requests.leave, progress)
            ends.callback(http.on_disconnect(partial(progress.interrupt, Interrupt.DISCONNECT)))
            await self._serve(progress, responder)

    async def _serve(self, progress: Progress, responder: Responder) -> None:
        """Count, queue, place and carry *progress*, on another instance when one is lost, and complete it.

        Its row is in the journal before its client has the end of an answer: a process that is killed loses none.
        """
        lost: InstanceLost | None = None

        def completed(usage: Usage) -> None:
            if progress.state is not RequestState.DONE:
                if progress.call.kind.computes:
                    progress.note_work(self.requests.clock(), usage)
                self._finish(progress, usage)

        responder.completed = completed
        try:
            if (entering := self.admission.entries.enter(progress)) is not None:
                await entering
            self.requests.submit(progress)
            usage: Usage | None = None
            while usage is None:
                try:
                    placed = await self.requests.placed(progress, responder)
                    usage = await self.upstream.carry(progress, placed, responder)
                except Evicted:
                    self.requests.place_again(progress)
                except InstanceLost as error:
                    lost = error
                    self.requests.place_again(progress, lost)
                except asyncio.CancelledError:
                    if progress.interrupted is not Interrupt.INSTANCE_LOST or progress.task is None:
                        raise
                    # The news came before it was sent there.
                    progress.task.uncancel()
                    progress.interrupted, lost = None, InstanceLost(Interrupt.INSTANCE_LOST.value)
                    self.requests.place_again(progress, lost)
            if progress.state is not RequestState.DONE:
                self._finish(progress, usage)
        except RefusedByInstance as refused:
            progress.fail(refused)
        except ApiError as error:
            error.by_instance = lost is not None and lost.failure == ERROR
            if lost is not None and lost.came and error.code == "upstream_failed":
                error.message += f" The last one answered with {lost.came}."
            if isinstance(error, Interrupted):
                self.requests.leave(progress, error.failure, error.reason)
            never_begun = progress.state <= RequestState.WAITING and not progress.first_token_s
            progress.fail(error, RequestState.REJECTED if never_begun else RequestState.FAILED)
            raise
        except asyncio.CancelledError:
            # Not raised again: the request ends here, and the server would log each one as a failure of the application.
            if progress.task is not None:
                progress.task.uncancel()
            if progress.state is RequestState.DONE:  # its client left as it had everything
                return
            if progress.interrupted is Interrupt.DISCONNECT:
                progress.error_code = "client_disconnected"
                progress.move(RequestState.CANCELLED)
            else:  # without a reason the server is stopping and has waited long enough
                why = ENDS.get(progress.interrupted, STOPPING)
                progress.fail(why)
                with contextlib.suppress(Exception):
                    await responder.error(why)
        except Exception:
            progress.error_code, progress.status_code = "internal_error", 500
            progress.move(RequestState.FAILED)
            raise

    def _finish(self, progress: Progress, usage: Usage) -> None:
        self.requests.finished(progress, usage)
        self.records.close(progress, 200)
