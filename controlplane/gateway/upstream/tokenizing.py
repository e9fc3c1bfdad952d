"""Blocks of a prompt's tokens, for routers that know what instances have cached (`scheduling.routing.cached_blocks`).

A prompt of token ids is cut as it is. Any other is tokenized by an instance, as vLLM will (`/tokenize`), while the length of
its answer is predicted: within a time limit, and only a few at once. Where that fails, takes too long or does not say
what vLLM will compute (images, other calls), nothing is known of the prompt, and the router estimates.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from controlplane.dispatch.port import ServedModel, Tokenizer
from controlplane.gateway.admission.validation import Call, Kind
from scheduling.compiled import direct
from scheduling.routing import cached_blocks

MAX_AT_ONCE: Final = 16
WITHIN_S: Final = 0.25
"""Longest wait for an answer."""
MAX_MISSED: Final = 3
"""Answers missed in a row after which none is asked for `PAUSE_S`."""
PAUSE_S: Final = 10.0
MIN_BLOCKS: Final = 2
"""Prompts of fewer blocks are left to the estimate: there is little to win."""
RETRY_EVERY: Final = 50
"""Of prompts left alone because it takes longer than their prefill, one in so many is tokenized, to see if that holds."""
NEWEST: Final = 0.1
"""Weight of the latest time in the mean."""
MAX_CHARACTERS: Final = 1_000_000
MAX_KNOWN: Final = 1024
"""Prompts whose blocks are kept: a request is often sent again."""
OF_COMPLETIONS: Final = ("add_special_tokens",)
OF_CHATS: Final = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)
"""Fields that `/tokenize` takes as the call does."""
NOT_TAKEN: Final = ("documents", "reasoning_effort", "mm_processor_kwargs", "prompt_embeds")
"""Fields that change the tokens, and that it does not take."""


class _Answer(msgspec.Struct):
    tokens: list[int]


_decoder = msgspec.json.Decoder(_Answer)
_chain = direct(cached_blocks.chain)


class TokenBlocks:
    """*session* provides the connections."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], clock: Callable[[], float]) -> None:
        self._session, self._clock = session, clock
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._hashes = np.zeros(1024, np.int64)
        self._at_once = self._missed = 0
        self._paused_until_s = 0.0
        self._s_per_token: dict[str, float] = {}  # mean time of a token, by model
        self._left_out = 0
        self.asked = self.failed = self.reused = 0
        """Prompts that an instance tokenized, that it did not in time, and that were known."""
        self.waited_s = 0.0

    async def of(self, call: Call, served: ServedModel) -> bytes:
        """Return the hashes of the full blocks of *call*'s prompt; b"" where they are not known."""
        tokenizer = served.tokenizer
        if tokenizer is None:
            return b""
        adapter = served.name if served.base else ""
        salt = call.body.get("cache_salt")
        space = cached_blocks.space(adapter, salt if isinstance(salt, str) else "")
        ids = _ids(call)
        if ids is not None:
            return self._cut(ids, tokenizer.block_size, space)
        asked = _asked(call, tokenizer)
        if asked is None or call.prompt_characters < MIN_BLOCKS * tokenizer.block_size:
            return b""
        key = blake2b(asked, digest_size=16, salt=(space & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self.reused += 1
            return known
        if self._at_once >= MAX_AT_ONCE or self._clock() < self._paused_until_s:
            return b""
        if not self._pays(tokenizer):
            return b""
        ids = await self._ask(tokenizer, asked)
        if ids is None:
            return b""
        self._known[key] = blocks = self._cut(ids, tokenizer.block_size, space)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return blocks

    def _pays(self, tokenizer: Tokenizer) -> bool:
        """Whether a token is tokenized in less time than its prefill takes, by the latest answers; now and then True."""
        took_s, saves_s = self._s_per_token.get(tokenizer.model, 0.0), tokenizer.prefill_s_per_token
        if not saves_s or took_s <= saves_s:
            return True
        self._left_out += 1
        return self._left_out % RETRY_EVERY == 0

    def _cut(self, ids: list[int], size: int, first: int) -> bytes:
        count = len(ids) // size
        if count < MIN_BLOCKS:
            return b""
        if count > self._hashes.size:
            self._hashes = np.zeros(2 * count, np.int64)
        try:
            _chain(self._hashes, np.array(ids, np.int64), size, first)
        except (OverflowError, TypeError, ValueError):  # no id of any vocabulary: the instance will say so
            return b""
        return self._hashes[:count].tobytes()

    async def _ask(self, tokenizer: Tokenizer, asked: bytes) -> list[int] | None:
        """Return the ids of a prompt; None if they do not come in time."""
        headers = {"Content-Type": "application/json"}
        if tokenizer.api_key:
            headers["Authorization"] = f"Bearer {tokenizer.api_key}"
        self._at_once += 1
        began_s = self._clock()
        try:
            async with (
                asyncio.timeout(WITHIN_S),
                self._session().post(
                    f"{tokenizer.url}/tokenize", data=asked, headers=headers, allow_redirects=False
                ) as response,
            ):
                body = await response.read()
                if response.status != 200:  # it is the call that is wrong, and its instance will say why
                    return None
            ids = _decoder.decode(body).tokens
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            self.failed += 1
            self._missed += 1
            if self._missed >= MAX_MISSED:
                self._missed, self._paused_until_s = 0, self._clock() + PAUSE_S
            return None
        finally:
            self._at_once -= 1
            self.waited_s += self._clock() - began_s
        self.asked += 1
        self._missed = 0
        took_s = (self._clock() - began_s) / max(1, len(ids))
        before_s = self._s_per_token.get(tokenizer.model, took_s)
        self._s_per_token[tokenizer.model] = before_s + NEWEST * (took_s - before_s)
        return ids


def _ids(call: Call) -> list[int] | None:
    """Return the prompt of a completion that is one list of token ids."""
    prompt = call.body.get("prompt") if call.kind is Kind.COMPLETION else None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is int else None


def _asked(call: Call, tokenizer: Tokenizer) -> bytes | None:
    """Return the body of the question for the tokens of *call*; None where the answer would not be what vLLM computes."""
    body = call.body
    if call.prompt_characters > MAX_CHARACTERS or any(body.get(name) is not None for name in NOT_TAKEN):
        return None
    asked: dict[str, Any] = {"model": tokenizer.model}
    if call.kind is Kind.COMPLETION:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        asked["prompt"] = prompt
        fields: tuple[str, ...] = OF_COMPLETIONS
    elif call.kind is Kind.CHAT:
        if any(isinstance(part, dict) and part.get("type", "text") != "text" for part in _parts(body)):
            return None
        fields = OF_CHATS
    else:
        return None
    asked |= {name: body[name] for name in fields if body.get(name) is not None}
    return msgspec.json.encode(asked)


def _parts(body: dict[str, Any]) -> list[Any]:
    messages = body["messages"] if isinstance(body.get("messages"), list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content]
