"""Prefix hashes of a prompt, by its leading blocks: the router by delay compares prompts by them.

Text is cut every `BLOCK_CHARACTERS`, token ids every `BLOCK_IDS`; only the blocks that `scheduling.routing.prefix_affinity`
notes are hashed, each with everything before it, so a prompt of any length costs at most 64 hashes of 61,440 characters.
Equal hashes mean equal prefixes, in whichever process they were computed; without the secret key they say nothing of a
text, not even to one who can guess it. Images and sounds count by their length and ends.
A prompt without a whole block, such as an image with a short question, is known by its session instead, where it has one.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from django.conf import settings

from controlplane.gateway.admission.validation import SPEECH, Call, Kind
from scheduling.routing.prefix_affinity import PLACES
from scheduling.simulation.workload.prefix_groups import HASH_BYTES

BLOCK_CHARACTERS = 256
BLOCK_IDS = 64
READ_CHARACTERS = 4096
"""Of an image or a sound count so many at either end, which bounds the time."""
LONGEST = PLACES[-1] * BLOCK_CHARACTERS


class LeadingBlocks(NamedTuple):
    """Noted blocks of a prompt."""

    hashes: list[int]
    block_tokens: int
    """Tokens per block."""
    system_blocks: int = 0
    """Of these, those that lie within its system prompt and tools."""


SYSTEM_ROLES = ("system", "developer")


def system_messages(call: Call) -> int:
    """Return how many of the first turns of a conversation are its system prompt."""
    if call.kind is not Kind.CHAT:
        return int(bool(call.body.get("system" if call.kind is Kind.MESSAGE else "instructions")))
    return next((at for at, (role, _) in enumerate(call.turns) if role not in SYSTEM_ROLES), len(call.turns))


def leading_hashes(call: Call, prompt_tokens: int, session: str = "") -> LeadingBlocks:
    """Return the noted blocks of *call*'s prompt; *prompt_tokens*: of the whole prompt.

    Without a block, the one of its *session*, of any length.
    """
    blocks = _of_prompt(call, prompt_tokens)
    if blocks.hashes or not session or not call.kind.generates:
        return blocks
    state = _hash(f"{call.model}\0session\0{session}")
    return LeadingBlocks([int.from_bytes(state.digest(), "little")], max(1, prompt_tokens))


def _hash(text: str) -> blake2b:
    key = settings.SECRET_KEY.encode()[: blake2b.MAX_KEY_SIZE]
    return blake2b(text.encode(errors="surrogatepass"), digest_size=HASH_BYTES, key=key)


def _of_prompt(call: Call, prompt_tokens: int) -> LeadingBlocks:
    if not call.kind.generates or call.kind in SPEECH:
        return LeadingBlocks([], 0)
    prompt = call.body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return LeadingBlocks(_chain(_space(call), prompt, BLOCK_IDS), BLOCK_IDS)
    text = prompt if isinstance(prompt, str) else _conversation(call)
    characters = max(call.prompt_characters, 1)
    hashes = _chain(_space(call), text, BLOCK_CHARACTERS)
    block_tokens = max(1, BLOCK_CHARACTERS * prompt_tokens // characters)
    return LeadingBlocks(hashes, block_tokens, _system_blocks(call, len(hashes)))


def _space(call: Call) -> str:
    """Return what divides prefix caches: the model, and a salt, which separates callers in vLLM."""
    salt = call.body.get("cache_salt")
    return f"{call.model}\0{salt}" if salt else call.model


def _system_blocks(call: Call, most: int) -> int:
    """Return how many of the first *most* noted blocks lie within the system prompt and tools of *call*."""
    count = system_messages(call) if call.turns else 0
    if not count:
        return 0
    characters = sum(len(piece) for piece in _pieces(call, count))
    return sum(1 for end in PLACES[1 : most + 1] if end * BLOCK_CHARACTERS <= characters)


def _conversation(call: Call) -> str:
    """Return the start of a conversation as a chat template lays it out: tools, then each turn's role and text."""
    pieces, size = [], 0
    for piece in _pieces(call):
        pieces.append(piece[: LONGEST - size])
        size += len(pieces[-1])
        if size >= LONGEST:
            break
    return "".join(pieces)


def _pieces(call: Call, most_turns: int | None = None) -> Iterator[str]:
    if call.body.get("tools"):
        yield msgspec.json.encode(call.body["tools"]).decode()
    for role, content in call.turns[:most_turns]:
        yield f"\n{role}\n"
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text")
            yield text if isinstance(text, str) else f"\0{_digest(part)}"


def _digest(part: Any) -> str:
    """Return a digest of a part of another kind: of the length and the ends of each text in it."""
    state, left = blake2b(digest_size=8), [part]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, str):
            ends = value if len(value) <= 2 * READ_CHARACTERS else value[:READ_CHARACTERS] + value[-READ_CHARACTERS:]
            state.update(f"{len(value)}\0{ends}".encode(errors="surrogatepass"))
    return state.hexdigest()


def _chain(model: str, prompt: Sequence[Any], block: int) -> list[int]:
    """Return hashes of *prompt* up to the end of each noted block, of *block* characters or ids."""
    state, hashes = _hash(model), list[int]()
    state.update(b"\0text" if isinstance(prompt, str) else b"\0ids")
    for start, end in pairwise(PLACES):
        if end * block > len(prompt):
            break
        piece = prompt[start * block : end * block]
        # JSON has ids of up to 64 bits, and may have lone surrogates
        try:
            state.update(
                piece.encode(errors="surrogatepass") if isinstance(piece, str) else array("Q", piece).tobytes()
            )
        except (TypeError, OverflowError):  # no token ids: vLLM refuses them
            break
        hashes.append(int.from_bytes(state.digest(), "little"))
    return hashes
