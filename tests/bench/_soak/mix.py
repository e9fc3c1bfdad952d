"""Requests as real clients send them: through the `openai` SDK, with histories, tools, many choices, and early
departures.

Each kind sends one request and records the outcome. Faulty requests: `wrong.py`.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.bench._soak.seen import HTTP, End, Seen

MODELS = ("llama-3.1-8b", "llama-3.2-3b", "llama-2-70b")
REGIONS = ("us-east", "us-central", "us-west", "")
CLASSES = {"acme": ("interactive", "non-interactive", "opportunistic"), "globex": ("non-interactive", "opportunistic")}
WELL = frozenset({200})
TOPICS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Schreibe einen kurzen Brief an die Hausverwaltung.",
    "写一首关于大海的短诗。",
    "Refactor this function so that it is tested more easily:\n```python\ndef f(x):\n    return g(x) + 1\n```",
    "¿Cuánto es 17 por 23? Responde solo con el número.",
    "Summarise the minutes of the meeting below. " + "The committee discussed the budget. " * 40,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
WAITS_S = 120.0
GIVES_UP_S = 0.4

Send = Callable[["Mix", Seen], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request: its frequency, its sender, and the expected statuses."""

    name: str
    weight: float
    send: Send
    expects: frozenset[int] = WELL


class Mix:
    """Clients of two tenants. `seen` has every request that has ended."""

    def __init__(self, url: str, keys: dict[str, str], kinds: tuple[Kind, ...], seed: int) -> None:
        self.url, self.keys, self.kinds = url, keys, kinds
        self.draw = random.Random(seed)
        self.seen: list[Seen] = []
        self.open: set[asyncio.Task[None]] = set()
        self.conversations: deque[list[dict[str, Any]]] = deque(maxlen=40)
        self._attempts: dict[str, int] = {}
        self._http = {
            tenant: DefaultAsyncHttpxClient(
                event_hooks={"request": [self._sent]}, limits=HTTP.Limits(max_connections=None)
            )
            for tenant in keys
        }
        self._clients = {
            tenant: AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAITS_S, http_client=self._http[tenant]
            )
            for tenant, key in keys.items()
        }

    async def _sent(self, request: Any) -> None:
        request_id = request.headers.get("X-Request-Id", "")
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1

    async def run(self, per_s: float, stop: asyncio.Event) -> None:
        """Send *per_s* requests a second on average until *stop*, then wait for those under way."""
        weights = [kind.weight for kind in self.kinds]
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self.draw.expovariate(per_s))
                break
            (kind,) = self.draw.choices(self.kinds, weights)
            task = asyncio.create_task(self.one(kind))
            self.open.add(task)
            task.add_done_callback(self.open.discard)
        if self.open:
            await asyncio.wait(self.open, timeout=2 * WAITS_S)
        for client in self._http.values():
            await client.aclose()

    async def one(self, kind: Kind) -> None:
        """Send one request of *kind* and record its outcome."""
        seen = Seen(f"soak-{uuid.uuid4().hex[:12]}", kind.name, kind.expects)
        try:
            await kind.send(self, seen)
        except Exception as error:
            seen.failed(error)
        seen.ended_at = time.time()
        seen.attempts = max(1, self._attempts.pop(seen.request_id, 1))
        self.seen.append(seen)

    def ask(self, seen: Seen, tenant: str = "", **more: Any) -> tuple[AsyncOpenAI, dict[str, Any]]:
        """Return a client and the common arguments: model, class, region, id, a bound on the answer."""
        tenant = tenant or self.draw.choice(tuple(self.keys))
        seen.model = self.draw.choice(MODELS)
        seen.slo_class = self.draw.choice(CLASSES[tenant])
        headers = {"X-Request-Id": seen.request_id, "X-SLO-Class": seen.slo_class}
        if region := self.draw.choice(REGIONS):
            headers["X-Region"] = region
        return self._clients[tenant], {
            "model": seen.model,
            "max_tokens": self.draw.randint(8, 120),
            "extra_headers": headers,
            **more,
        }


async def read(stream: Any, seen: Seen, most: int | None = None, roles: int = 1) -> str:
    """Read a stream to its end, or leave after *most* events; record the events. *roles*: events that begin a
    choice.
    """
    events, usage, text = 0, None, []
    async with stream:
        async for chunk in stream:
            usage = chunk.usage or usage
            if not chunk.choices:
                continue
            events += 1
            delta = getattr(chunk.choices[0], "delta", None)
            text.append((delta.content if delta is not None else chunk.choices[0].text) or "")
            if events == most:
                seen.left()
                return ""
    seen.done(usage, None if usage else events - roles)
    return "".join(text)


async def turn(mix: Mix, seen: Seen) -> None:
    """Send the next turn of a conversation."""
    talk = mix.conversations.popleft() if len(mix.conversations) > 20 else []
    talk = [*talk, {"role": "user", "content": mix.draw.choice(TOPICS)}]
    client, about = mix.ask(seen)
    answer = await client.chat.completions.create(messages=talk, **about)
    seen.done(answer.usage)
    assert len(answer.choices) == 1
    if len(talk) < 20:
        mix.conversations.append([*talk, {"role": "assistant", "content": answer.choices[0].message.content}])


async def streamed_turn(mix: Mix, seen: Seen) -> None:
    """The same, streamed, under a system prompt and with usage."""
    talk = [{"role": "system", "content": "You are a terse assistant. " * 8}]
    talk += mix.conversations.popleft() if len(mix.conversations) > 20 else []
    talk.append({"role": "user", "content": mix.draw.choice(TOPICS)})
    client, about = mix.ask(seen, stream=True, stream_options={"include_usage": True})
    text = await read(await client.chat.completions.create(messages=talk, **about), seen)
    assert seen.end is not End.DONE or (seen.output_tokens or 0) > 0
    if len(talk) < 20:
        mix.conversations.append([*talk[1:], {"role": "assistant", "content": text}])


def topic(mix: Mix) -> list[dict[str, Any]]:
    return [{"role": "user", "content": mix.draw.choice(TOPICS)}]


async def streamed(mix: Mix, seen: Seen) -> None:
    client, about = mix.ask(seen, stream=True)
    await read(await client.chat.completions.create(messages=topic(mix), **about), seen)


async def choices(mix: Mix, seen: Seen) -> None:
    client, about = mix.ask(seen, n=3)
    answer = await client.chat.completions.create(messages=topic(mix), **about)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    seen.done(answer.usage)


async def streamed_choices(mix: Mix, seen: Seen) -> None:
    client, about = mix.ask(seen, n=2, stream=True)
    await read(await client.chat.completions.create(messages=topic(mix), **about), seen, roles=2)


async def tools(mix: Mix, seen: Seen) -> None:
    """Send a history with an answered tool call; its messages have no text, or none for the user."""
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": -3}'},
    ]
    client, about = mix.ask(seen, tools=TOOLS, tool_choice="none")
    answer = await client.chat.completions.create(messages=talk, **about)
    seen.done(answer.usage)


async def tool_call(mix: Mix, seen: Seen) -> None:
    """Stream an answer that may call a tool."""
    client, about = mix.ask(seen, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    await read(await client.chat.completions.create(messages=topic(mix), **about), seen)


async def response(mix: Mix, seen: Seen) -> None:
    """Send a Responses request, streamed every other time; stream events are typed, the last has the usage."""
    client, about = mix.ask(seen)
    about["max_output_tokens"] = about.pop("max_tokens")
    whole = about | {"instructions": "Be terse.", "input": mix.draw.choice(TOPICS)}
    if mix.draw.random() < 0.5:
        answer = await client.responses.create(**whole)
    else:
        events = [event async for event in await client.responses.create(**whole, stream=True)]
        assert events[0].type == "response.created"
        answer = events[-1].response
    seen.done()
    seen.prompt_tokens, seen.output_tokens = answer.usage.input_tokens, answer.usage.output_tokens


async def parts(mix: Mix, seen: Seen) -> None:
    """Send content in parts, stop words, a user's name, and fields specific to vLLM."""
    content = [{"type": "text", "text": "Look:"}, {"type": "text", "text": mix.draw.choice(TOPICS)}]
    extra = {"top_k": 20, "repetition_penalty": 1.05, "min_tokens": 2, "priority": 7}
    client, about = mix.ask(seen, stop=["\n\n\n"], user="u-17", temperature=0.2, extra_body=extra)
    answer = await client.chat.completions.create(messages=[{"role": "user", "content": content}], **about)
    seen.done(answer.usage)


async def text(mix: Mix, seen: Seen) -> None:
    client, about = mix.ask(seen, seed=3)
    answer = await client.completions.create(prompt=mix.draw.choice(TOPICS), **about)
    seen.done(answer.usage)


async def token_ids(mix: Mix, seen: Seen) -> None:
    ids = [mix.draw.randrange(1000, 30_000) for _ in range(mix.draw.randint(1, 700))]
    client, about = mix.ask(seen, extra_body={"ignore_eos": True}, stream=True)
    await read(await client.completions.create(prompt=ids, **about), seen, roles=0)
    if seen.end is End.DONE:
        assert seen.output_tokens == about["max_tokens"], (seen.output_tokens, about["max_tokens"])
        seen.prompt_tokens = len(ids)


async def batch(mix: Mix, seen: Seen) -> None:
    """Send several prompts at once, as texts or token ids, with two answers each."""
    prompts: list[Any] = [mix.draw.choice(TOPICS) for _ in range(3)]
    if mix.draw.random() < 0.5:
        prompts = [[mix.draw.randrange(1000, 30_000) for _ in range(50)] for _ in range(3)]
    client, about = mix.ask(seen, n=2)
    answer = await client.completions.create(prompt=prompts, **about)
    assert len(answer.choices) == 6
    seen.done(answer.usage)


async def by_tier(mix: Mix, seen: Seen) -> None:
    """Set the class by OpenAI's field instead of our header."""
    client, about = mix.ask(seen, "acme", service_tier="flex")
    del about["extra_headers"]["X-SLO-Class"]
    seen.slo_class = "non-interactive"
    answer = await client.chat.completions.create(messages=topic(mix), **about)
    seen.done(answer.usage)


async def retrying(mix: Mix, seen: Seen) -> None:
    """Use an SDK with its default of two retries, under one id."""
    client, about = mix.ask(seen)
    answer = await client.with_options(max_retries=2).chat.completions.create(messages=topic(mix), **about)
    seen.done(answer.usage)


async def leaves_stream(mix: Mix, seen: Seen) -> None:
    """Stop reading in the middle of the stream."""
    client, about = mix.ask(seen, stream=True, n=mix.draw.choice((1, 1, 2)))
    about["max_tokens"] = 400
    await read(await client.chat.completions.create(messages=topic(mix), **about), seen, most=mix.draw.randint(1, 60))
    if seen.end is End.DONE:
        seen.output_tokens = None  # the number of choices is not recorded


async def gives_up(mix: Mix, seen: Seen) -> None:
    """Wait for a whole answer, but give up early."""
    client, about = mix.ask(seen, timeout=HTTP.Timeout(30.0, read=GIVES_UP_S))
    about["max_tokens"], seen.unread = 600, True
    answer = await client.chat.completions.create(messages=topic(mix), **about)
    seen.done(answer.usage)


KINDS = (
    Kind("turn", 4, turn),
    Kind("streamed turn", 4, streamed_turn),
    Kind("streamed", 3, streamed),
    Kind("choices", 1, choices),
    Kind("streamed choices", 1, streamed_choices),
    Kind("tools", 1, tools),
    Kind("tool call", 1, tool_call),
    Kind("response", 2, response),
    Kind("parts", 1, parts),
    Kind("text", 1, text),
    Kind("token ids", 2, token_ids),
    Kind("batch", 1, batch),
    Kind("by tier", 1, by_tier),
    Kind("retrying", 1, retrying),
    Kind("leaves a stream", 2, leaves_stream),
    Kind("gives up", 1, gives_up),
)
