"""A stream on its way from an instance to the tenant: looked at, and written in the call that read it from the socket."""

from collections.abc import Callable

from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.serving.responder import SSE_TYPE, Responder
from controlplane.gateway.serving.ticket import Ticket
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection
from controlplane.gateway.upstream.failures import ERROR_MARK, engine_failure
from controlplane.gateway.upstream.stream import (
    DELTA_MARK,
    DONE_MARK,
    END,
    ENDED_MARK,
    FINISH_MARK,
    USAGE_MARK,
    Usage,
    Withheld,
    around_text,
    only_opens,
    split_events,
)

MOST_SHAPES = 8
"""With log probabilities, or several choices, hardly an event is like the one before it: no more are looked at then."""


class Stream:
    """*fingerprint*: `Withheld.fingerprint`, as the server last sent it. *began* is called at the first byte."""

    __slots__ = (
        "_began",
        "_finished",
        "_open",
        "_prefix",
        "_responder",
        "_shapes_left",
        "_suffix",
        "_ticket",
        "_unfinished",
        "_usage",
        "_withheld",
        "fingerprint",
    )

    def __init__(
        self,
        ticket: Ticket,
        responder: Responder,
        usage: Usage,
        fingerprint: bytes,
        began: Callable[[Ticket], None],
    ) -> None:
        self.fingerprint = fingerprint
        self._ticket, self._responder, self._usage, self._began = ticket, responder, usage, began
        self._withheld = None if ticket.call.include_usage else Withheld(ticket.call.sequences, fingerprint)
        self._unfinished = b""
        self._finished = False  # a choice has ended, by its own word
        self._open = False  # it has begun, and nothing of it is held back
        self._prefix = self._suffix = b""  # of the last event that was a token and nothing else
        self._shapes_left = 0 if ticket.call.kind is Kind.RESPONSE else MOST_SHAPES  # its events are numbered

    async def carry(self, connection: Connection) -> None:
        """Pass the answer of *connection* on to its end. Raises EngineFailed, OSError."""
        responder = self._responder
        connection.pass_to(self._take, self._take_chunk)
        while True:
            await connection.wait()
            if responder.held:
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
                await responder.drain()
            if not self._usage.whole:  # else the tenant has everything, and may have gone
                connection.check()
            if connection.complete or connection.failed:
                break
            connection.resume()
        if not self._ticket.course.first_token_s:
            raise AnswerCutOff("the stream ended before it began")
        if not (self._usage.whole or self._finished or DONE_MARK in self._unfinished):
            raise AnswerCutOff("the stream ended before its last event")
        rest = b""
        if self._withheld is not None:
            self.fingerprint = self._withheld.fingerprint
            rest = self._withheld.rest()
        await responder.finish(rest + self._unfinished)

    def _take(self, chunk: bytes) -> bool:
        """Pass on what of *chunk* are whole events; False if the tenant has to read first."""
        if self._unfinished or not chunk.endswith(b"\n\n"):
            chunk, self._unfinished = split_events(self._unfinished + chunk)
            if not chunk:
                return True
        events, course, call = chunk, self._ticket.course, self._ticket.call
        response = call.kind is Kind.RESPONSE
        if response and not course.first_token_s and only_opens(chunk):
            self._unfinished = chunk + self._unfinished  # said before the engine began: goes out with the first token
            return True
        failure = engine_failure(chunk) if ERROR_MARK in chunk else None
        if failure is not None:
            chunk = chunk[: chunk.index(ERROR_MARK)]
            if not (course.first_token_s and chunk):
                raise failure
        if not course.first_token_s:
            self._began(self._ticket)
            if call.kind is Kind.CHAT:
                course.output_tokens -= call.sequences  # each choice begins with an event for its role alone
        if response:
            course.output_tokens += chunk.count(DELTA_MARK)
        else:
            course.output_tokens += chunk.startswith(b"data: ") + chunk.count(b"\ndata: ")
        if USAGE_MARK in chunk:
            self._usage.read_events(chunk)
        if self._withheld is not None:
            chunk = self._withheld.take(chunk)
        taken = True
        if chunk:
            last = ENDED_MARK.search(chunk) is not None if response else DONE_MARK in chunk
            self._usage.whole = self._usage.whole or last
            self._finished = self._finished or FINISH_MARK in events
            taken = self._responder.write_now(chunk)
        if failure is not None:
            raise failure
        self._open = taken and not self._unfinished and not (self._withheld and self._withheld.holds)
        if self._open and self._shapes_left:
            self._learn(events)
        return taken

    def _take_chunk(self, chunk: bytes, begin: int) -> bool:
        """Pass on an HTTP *chunk* as it came if it is one event like the last one but for its text: a token, and no more."""
        prefix, suffix = self._prefix, self._suffix
        if (
            not suffix
            or not self._open
            or not chunk.endswith(suffix)
            or not chunk.startswith(prefix, begin)
            or chunk.find(b'"', begin + len(prefix), -len(suffix)) >= 0
            or not self._responder.write_chunk(chunk)
        ):
            return False
        self._ticket.course.output_tokens += 1
        return True

    def _learn(self, events: bytes) -> None:
        """Remember the last of *events* but for its text, if it is a token."""
        event = events[:-2].rpartition(b"\n\n")[2]
        if not self._suffix or not event.startswith(self._prefix) or not event.endswith(self._suffix[: -len(END)]):
            self._prefix, self._suffix = around_text(event)
            self._shapes_left -= 1
