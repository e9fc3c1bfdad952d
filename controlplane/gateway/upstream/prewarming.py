"""Requests for one token that compute a system prompt at a server before a call needs it (Hermes section 3.4).

Texts are kept in memory alone, within bounds, as bodies that ask for nothing else: the system prompt, the tools and what
changes how they are laid out. A cache salt is among these, so that vLLM keeps what is cached for one salt from others. They
are no tenant's requests: no usage, no row in the ledger, and the last priority.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from controlplane.background import spawn
from controlplane.dispatch.port import PrefixWarmed, WarmPrefix
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.serving.prefixes import system_messages
from workers.vllm.client import VllmClient, VllmError

MAX_TEXTS: Final = 1_000
MAX_BYTES: Final = 16 * 1024 * 1024
"""Of all texts; the one that was used least lately goes first."""
MAX_BYTES_OF_ONE: Final = 256 * 1024
ANSWER_S: Final = 60.0
LAST: Final = 2**31 - 1
"""vLLM's priority of what comes after all else."""
LAID_OUT_BY: Final = (
    *("model", "tools", "tool_choice", "cache_salt", "chat_template", "chat_template_kwargs", "documents"),
    *("reasoning_effort", "reasoning", "thinking", "add_special_tokens", "mm_processor_kwargs"),
)
"""Fields that change how a system prompt is laid out, or for whom it is cached."""


def one_token(call: Call) -> dict[str, Any]:
    """Return the body of a request for one token with the system prompt of *call*, a conversation."""
    body = {name: call.body[name] for name in LAID_OUT_BY if name in call.body} | {"priority": LAST}
    nothing = {"role": "user", "content": "."}
    if call.kind is Kind.RESPONSE:
        return body | {"instructions": call.body["instructions"], "input": ".", "max_output_tokens": 1, "store": False}
    if call.kind is Kind.MESSAGE:
        return body | {"system": call.body["system"], "messages": [nothing], "max_tokens": 1}
    return body | {"messages": [*call.body["messages"][: system_messages(call)], nothing], "max_tokens": 1}


class Prefixes:
    """*session* provides the connections, *send* takes the answers for the dispatcher."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], send: Callable[[PrefixWarmed], None]) -> None:
        self._session, self._send = session, send
        self._texts: OrderedDict[int, tuple[str, bytes]] = OrderedDict()
        """By the hash of a prompt's last whole block: path and body."""
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, prefix: int, call: Call) -> None:
        """Keep the system prompt of *call*."""
        if prefix in self._texts:
            self._texts.move_to_end(prefix)
            return
        text = msgspec.json.encode(one_token(call))
        if len(text) > MAX_BYTES_OF_ONE:
            return
        self._texts[prefix] = call.kind.path, text
        self._bytes += len(text)
        while len(self._texts) > MAX_TEXTS or self._bytes > MAX_BYTES:
            _, (_, gone) = self._texts.popitem(last=False)
            self._bytes -= len(gone)

    def warm(self, asked: WarmPrefix) -> None:
        """Send the request that *asked* wants; its end is sent to the dispatcher."""
        task = spawn(self._warm(asked), "warm prefix")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel what is in progress."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm(self, asked: WarmPrefix) -> None:
        known, failure = self._texts.get(asked.prefix), ""
        if known is None:
            failure = "Its text is no longer in memory."
        else:
            client = VllmClient(asked.url, self._session(), api_key=asked.api_key, timeout_s=ANSWER_S)
            try:
                await client.prefill(*known)
            except VllmError as error:
                failure = "It did not answer." if error.status is None else f"It answered {error.status}."
        self._send(PrefixWarmed(asked.instance, asked.ready_at, asked.prefix, failure))
