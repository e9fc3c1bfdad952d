"""From tokens to bytes: the sequences of a request, and its answer as one JSON body or as a stream of events.

A fleet of emulated servers emits tens of thousands of tokens a second in one process, so a streamed token costs one
concatenation and one write: everything in an event but the word is built once per sequence, HTTP's chunk framing
included, and the event goes straight to the connection.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from workers.emulator.calls import CheckedCall, Prompt
from workers.emulator.text import END_ID, LENGTHS, PIECES, WORDS, token_id

_COUNT = len(PIECES)
# HTTP/1.1 chunk heads by length; longer chunks (the first one, the last one) are framed when they are made.
_HEADS = tuple(b"%x\r\n" % length for length in range(2048))
MARK: Final = "\0"
DONE: Final = b"data: [DONE]\n\n"


class CutError(Exception):
    """The server of this request died; its connection is closed without another byte."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence being generated: `output_tokens` words of the prose from `offset` on.

    Times are seconds of the event loop's clock.
    """

    engine_id: str
    answer: "Answer"
    index: int
    prompt: Prompt
    max_tokens: int
    arrival_s: float
    output_tokens: int = 1
    offset: int = 0
    finish_reason: str = "length"  # what it will be: "stop" or "length"; "abort" when it is stopped from outside
    stop_reason: str | None = None
    pieces: list[str] | None = None  # the text token by token when it is not prose, or a stop string cuts it, else None
    tool: str = ""  # the function that is called: its arguments are the text
    call_id: str = ""
    continues: bool = False  # its prompt ends with an answer begun, and no first word begins this one
    own: tuple[int, int] | None = None  # names its answer: the prompt before it, and its first word
    produced: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    admitted_s: float | None = None  # first time that the engine ran it
    preemptions: int = 0
    cached_tokens: int = 0  # of its prompt, in the prefix cache when it was admitted first
    # For a stream: an event is prefix + word + suffix, and framed so long without the word.
    prefix: bytes = b""
    suffix: bytes = b""
    frame_bytes: int = 0

    def piece(self, number: int) -> str:
        """Return the text of token *number* (from 0)."""
        if self.pieces is not None:
            return self.pieces[number]
        if number == self.output_tokens - 1 and self.finish_reason == "stop":
            return ""  # the end-of-sequence token counts and has no text
        word = WORDS[(self.offset + number) % _COUNT]
        return " " + word if number or self.continues else word

    def token_ids(self, begin: int, end: int) -> list[int]:
        """Return the ids of the tokens from *begin* to *end*."""
        ids = [token_id(self.offset + number) for number in range(begin, end)]
        if end == self.output_tokens and self.finish_reason == "stop" and self.stop_reason is None:
            ids[-1:] = [END_ID]
        return ids

    def written(self) -> str:
        """Return the text of all tokens so far."""
        return "".join(self.piece(number) for number in range(self.produced))


class Answer:
    """One request's answer. The instance's loop calls `token` for each token and `ended` when a sequence is complete."""

    def __init__(self, asked: CheckedCall, request_id: str, model: str, created_s: int) -> None:
        self.asked = asked
        self.request_id = request_id
        self.model = model
        self.created_s = created_s
        self.sequences: list[Sequence] = []
        self.unfinished = 0
        self.reports_cached = False  # whether the server reports how much of a prompt was cached
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the sequences of this request, in the order of their indices."""
        self.sequences = sequences
        self.unfinished = len(sequences)

    def token(self, sequence: Sequence) -> None:
        """Take one more token of *sequence*."""
        sequence.produced += 1

    def ended(self, sequence: Sequence) -> None:
        """Record that *sequence* is complete; after the last one, wake the task that waits for the answer."""
        self.unfinished -= 1
        if self.unfinished == 0:
            self.closed()

    def closed(self) -> None:
        """Wake the task that waits for the answer."""
        if not self.done.done():
            self.done.set_result(None)

    def aborted(self, sequence: Sequence) -> None:
        """End *sequence* before its time: nothing more is sent of it."""

    def cut(self) -> None:
        """End the answer with CutError: the server died."""
        if not self.done.done():
            self.done.set_exception(CutError())

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.asked.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(sequence.produced for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompts that were in the prefix cache."""
        each = max(1, len(self.sequences) // max(1, len(self.asked.prompts)))
        return sum(sequence.cached_tokens for sequence in self.sequences[::each])

    def usage(self, output_tokens: int | None = None) -> dict[str, int]:
        """Return OpenAI's usage; *output_tokens* in place of those produced so far."""
        output = self.output_tokens if output_tokens is None else output_tokens
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


class Shape:
    """The bytes of one answer, which is whole or streamed."""

    alike: bool = False
    """Whether the events of a sequence, but the first and the last, differ in their words alone."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked = answer.asked

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        raise NotImplementedError

    def at_once(self) -> bytes:
        """Return the events that are sent before the engine has begun."""
        return b""

    def opening(self) -> bytes:
        """Return the events before the first token."""
        return b""

    def event(self, sequence: Sequence, piece: str, reason: str | None) -> bytes:
        """Return the event of the text *piece*; the last one has the *reason* for the end."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """Return the events after the last token."""
        return DONE


class StreamedAnswer(Answer):
    """An answer that is sent token by token, as server-sent events in HTTP/1.1 chunks on *transport*.

    The head of the response was already sent, and the owner of the response writes the final empty chunk. Data that a
    slow reader has not taken waits in the transport's buffer, as it does in vLLM's output queue: at most the rest of
    its answer.
    """

    shape: Shape

    def __init__(
        self, asked: CheckedCall, request_id: str, model: str, created_s: int, transport: asyncio.Transport
    ) -> None:
        super().__init__(asked, request_id, model, created_s)
        self._transport = transport
        self._opened = False

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the sequences and build the constant parts of their events."""
        super().begin(sequences)
        self._write(self.shape.at_once())
        if self.shape.alike:
            mark = b"\\u0000"
            for sequence in sequences:
                before, _, after = self.shape.event(sequence, MARK, None).rpartition(mark)
                sequence.prefix, sequence.suffix = before, after + b"\r\n"
                sequence.frame_bytes = len(before) + len(after)

    def token(self, sequence: Sequence) -> None:
        number = sequence.produced
        sequence.produced = number + 1
        if 0 < number < sequence.output_tokens - 1 and sequence.pieces is None and self.shape.alike:
            place = (sequence.offset + number) % _COUNT
            if not self._transport.is_closing():  # uvloop raises; the server will hear of the disconnect in a moment
                head = _HEADS[sequence.frame_bytes + LENGTHS[place]]
                self._transport.write(head + sequence.prefix + PIECES[place] + sequence.suffix)
            return
        piece = sequence.piece(number)
        if self.asked.echo and number == 0:
            piece = sequence.prompt.echo + piece
        self._event(sequence, piece, sequence.finish_reason if number == sequence.output_tokens - 1 else None)

    def aborted(self, sequence: Sequence) -> None:
        """End *sequence* with an abort event. (A caller that disconnected needs none.)"""
        self._event(sequence, "", "abort")

    def closed(self) -> None:
        self._write(self.shape.closing())
        super().closed()

    def _event(self, sequence: Sequence, piece: str, reason: str | None) -> None:
        opening = b"" if self._opened else self.shape.opening()
        self._opened = True
        self._write(opening + self.shape.event(sequence, piece, reason))

    def _write(self, data: bytes) -> None:
        """Write *data* as one HTTP/1.1 chunk."""
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
