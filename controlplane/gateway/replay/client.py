"""One streamed completion through the gateway: when its tokens came, what it used, how it ended."""

import asyncio
from dataclasses import dataclass

import aiohttp
import orjson

# The event before `[DONE]` carries the usage; it is a few hundred bytes long.
TAIL_BYTES = 4096
DONE = "done"


@dataclass(slots=True)
class Answer:
    """What came of one request. *outcome* is `done`, or in a few words why not."""

    outcome: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None  # mean time between this request's output tokens
    e2e_ms: float | None = None

    @property
    def done(self) -> bool:
        return self.outcome == DONE


def body(model: str, ids: bytes, output_tokens: int) -> bytes:
    """A streamed completion of exactly *output_tokens* tokens for the prompt *ids* (see `prompts`)."""
    return b'{"model":%b,"prompt":[%b],"max_tokens":%d,"ignore_eos":true,"stream":true,%b}' % (
        orjson.dumps(model),
        ids,
        output_tokens,
        b'"stream_options":{"include_usage":true}',
    )


async def complete(session: aiohttp.ClientSession, url: str, data: bytes, headers: dict[str, str]) -> Answer:
    """Send *data* to *url* (`…/v1/completions`) and read the stream to its end. Raises nothing but CancelledError."""
    answer = Answer()
    clock = asyncio.get_running_loop().time
    began_s = clock()
    first_s = last_s = 0.0
    tail = bytearray()
    try:
        async with session.post(url, data=data, headers=headers) as response:
            if response.status != 200:
                answer.outcome = f"{response.status} {_code(await response.read())}".strip()
                return answer
            async for chunk in response.content.iter_any():
                if first_s:
                    last_s = clock()
                elif b"data: " in chunk:  # before it there may be comments that keep the connection alive
                    first_s = last_s = clock()
                tail += chunk
                if len(tail) > 2 * TAIL_BYTES:
                    del tail[:-TAIL_BYTES]
    except (aiohttp.ClientConnectorError, ConnectionRefusedError):
        answer.outcome = "not reached"
        return answer
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.outcome = f"connection lost ({type(error).__name__})"
        return answer
    answer.outcome = _read_tail(bytes(tail), answer)
    if answer.done:
        answer.ttft_ms = (first_s - began_s) * 1000
        answer.e2e_ms = (last_s - began_s) * 1000
        if answer.output_tokens > 1:
            answer.itl_ms = (last_s - first_s) * 1000 / (answer.output_tokens - 1)
    return answer


def _read_tail(tail: bytes, answer: Answer) -> str:
    """Usage and outcome from the last events of a stream."""
    events = [line[6:] for line in tail.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        error = _code(events[-1]) if events else ""
        return f"stream ended with {error}" if error else "stream cut short"
    for event in reversed(events[:-1]):
        try:
            usage = orjson.loads(event).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            break
        if usage:
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            return DONE
    return "no usage in the stream"


def _code(raw: bytes) -> str:
    """The code (or type) of an OpenAI error body, or nothing."""
    try:
        error = orjson.loads(raw)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ""
