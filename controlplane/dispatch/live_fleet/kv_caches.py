"""Prefix caches of the instances as their KV events say, for routers that consider the start of prompts.

`KvCache` keeps the blocks of one instance: vLLM's name of each, and the hash by which `scheduling.routing.cached_blocks`
knows it. `KvCaches` follows the instances whose deployment asks for it. An instance without events is estimated as before.

Where events are lost for good, blocks that were known are in doubt, as their removal may be among what was lost, and the
instance is estimated. A block in doubt is there if another one is stored after it. An engine reuses the block that was used
longest ago: once it has stored as many blocks as its cache holds, and none after a block that is not known, those still in
doubt are taken to be gone, and the cache is known again. When the server restarts or clears its cache it is at once. A block
that was stored in the gap may be missing then, but none is relied on that is not there.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import kernels
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import SERVING
from scheduling.routing.cached_blocks import space
from workers.vllm.kv_events import BlockHash, Cleared, Event, Follower, Lost, Removed, Source, Stored, sources

MOST_BLOCKS = 1 << 20
"""Blocks of one instance that are kept: of 16 tokens, those of 16 million."""
DISCOVER_S = 2.0
ASK_AGAIN_S = 30.0
"""Period of the question to an instance that publishes no events."""
GPU = (None, "GPU")
"""Media of blocks that a request finds at once; others are offloaded."""


@dataclass(slots=True)
class _Block:
    hashed: int
    before: BlockHash | None
    """Name of the block before it."""
    copies: int = 0


class KvCache:
    """The blocks of *replica* by its KV events."""

    def __init__(self, queue: WaitingQueue, replica: Replica) -> None:
        self.queue, self.slot = queue, replica.slot
        self.follower: Follower | None = None
        self.given = replica.spec.kv_events
        self.why = "not asked yet"
        """Why its cache is not known; "" if it is."""
        self.events = self.losses = 0
        self.block_tokens = replica.metrics.block_size if replica.metrics else 0
        self._blocks: dict[BlockHash, _Block] = {}  # by vLLM's name
        self._doubtful: set[BlockHash] = set()
        """Of these, the ones that may have been removed."""
        self._to_store: int | None = None
        """Blocks to be stored until it is known again, None unless events were lost."""
        self._hashes = np.zeros(64, np.int64)

    @property
    def count(self) -> int:
        """Blocks that it has."""
        return len(self._blocks)

    def known(self) -> None:
        """Rely on it from now on."""
        self.why = ""
        self.queue.affinity.blocks.block_tokens[self.slot] = self.block_tokens

    def unknown(self, why: str) -> None:
        """Estimate the cache from now on, because of *why*."""
        self.clear()
        self.why = why
        self.queue.affinity.blocks.block_tokens[self.slot] = 0

    def clear(self) -> None:
        """Drop all blocks."""
        self._drop([block.hashed for block in self._blocks.values() for _ in range(block.copies)])
        self._blocks.clear()
        self._doubtful.clear()
        self._to_store = None

    def _drop(self, hashes: list[int]) -> None:
        if hashes:
            kernels.drop_blocks(self.queue.affinity.blocks, self.slot, np.array(hashes, np.int64), 0, len(hashes))

    def doubt(self, why: str) -> None:
        """Estimate the cache, because of *why*, until it is known again."""
        self.why, self._doubtful = why, set(self._blocks)
        self.queue.affinity.blocks.block_tokens[self.slot] = 0
        self._expect_all()

    def _expect_all(self) -> None:
        """Expect as many blocks to be stored as the cache holds."""
        tokens = int(self.queue.topology.fleet.kv_capacity_tokens[self.slot])
        self._to_store = -(-tokens // self.block_tokens) if tokens and self.block_tokens else MOST_BLOCKS

    @property
    def unknown_because(self) -> str:
        """Why it is not known, and until when; "" if it is."""
        left = "" if self._to_store is None else f"; it is estimated until {self._to_store:,} more blocks are stored"
        return self.why + left

    def take(self, events: Iterable[Event]) -> None:
        """Take in what its server published."""
        for event in events:
            self.events += 1
            if isinstance(event, Stored):
                if self._follows and event.medium in GPU and not event.group_idx:
                    self._store(event)
            elif isinstance(event, Removed):
                if self._follows and event.medium in GPU and not event.group_idx:
                    self._remove(event.block_hashes)
            elif isinstance(event, Cleared):
                self.clear()
                self.known()
            else:
                self._lose(event)

    @property
    def _follows(self) -> bool:
        """Whether its events are of use: it is known, or will be again."""
        return not self.why or self._to_store is not None

    def _lose(self, lost: Lost) -> None:
        if lost.restarted:
            self.clear()
            self.known()
        else:
            self.losses += 1
            self.doubt(lost.reason)

    def _store(self, event: Stored) -> None:
        count = len(event.block_hashes)
        if not count:
            return
        if len(event.token_ids) != count * event.block_size:
            self.unknown("its events are of a model that caches only some blocks of a prompt")
            return
        if event.block_size != self.block_tokens:
            self.block_tokens = event.block_size
            if not self.why:
                self.known()
        first = self._first(event)
        if first is None:
            if self._to_store is None:
                self.doubt("it stored a block after one that was not published")
            self._expect_all()
        elif len(self._blocks) + count > MOST_BLOCKS:
            self.unknown(f"it has more than {MOST_BLOCKS:,} blocks")
        else:
            hashes = self._chain(event, first)
            self._trust(event)
            self.queue.fit_blocks(count)
            kernels.hold_blocks(self.queue.affinity.blocks, self.slot, hashes, 0, count)
            before = event.parent_block_hash
            for name, hashed in zip(event.block_hashes, hashes[:count].tolist(), strict=True):
                self._blocks.setdefault(name, _Block(hashed, before)).copies += 1
                before = name
            if self._to_store is not None:
                self._to_store -= count
                if self._to_store <= 0:
                    self._settle()

    def _trust(self, event: Stored) -> None:
        """Take the blocks before those of *event* to be there, once; its blocks, if they were in doubt, were removed."""
        if not self._doubtful:
            return
        name = event.parent_block_hash
        while name is not None and name in self._doubtful:
            self._doubtful.discard(name)
            block = self._blocks[name]
            self._drop([block.hashed] * (block.copies - 1))
            block.copies, name = 1, block.before
        self._forget(set(event.block_hashes) & self._doubtful)

    def _forget(self, names: set[BlockHash]) -> None:
        """Drop *names*, which are in doubt."""
        gone = [self._blocks.pop(name) for name in names]
        self._drop([block.hashed for block in gone for _ in range(block.copies)])
        self._doubtful -= names

    def _settle(self) -> None:
        """Drop what is still in doubt, and rely on the rest from now on."""
        self._forget(set(self._doubtful))
        self._to_store = None
        self.known()

    def _first(self, event: Stored) -> int | None:
        """Return the hash before the first block of *event*, None if that block is not known."""
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            return parent.hashed if parent else None
        keys = (event.extra_keys or [None])[0] or []
        texts = [key for key in keys if isinstance(key, str)]
        salt = texts[-1] if len(texts) > bool(event.lora_name) else ""
        return space(event.lora_name or "", salt)

    def _chain(self, event: Stored, first: int) -> NDArray[np.int64]:
        """Return the hashes of the blocks of *event*, after *first*; an image in a block is part of its hash."""
        count, size = len(event.block_hashes), event.block_size
        if count > self._hashes.size:
            self._hashes = np.zeros(2 * count, np.int64)
        token_ids = np.array(event.token_ids, np.int64)
        others = [_images(keys) for keys in event.extra_keys or []]
        if not any(others):
            kernels.chain_blocks(self._hashes, token_ids, size, first)
            return self._hashes
        for at in range(count):
            first ^= space(others[at], "image") if at < len(others) and others[at] else 0
            kernels.chain_blocks(self._hashes[at : at + 1], token_ids[at * size : (at + 1) * size], size, first)
            first = int(self._hashes[at])
        return self._hashes

    def _remove(self, names: list[BlockHash]) -> None:
        gone = []
        for name in names:
            if name in self._doubtful:
                self._forget({name})
            elif (block := self._blocks.get(name)) is not None:  # else stored under another hash before, or in a gap
                gone.append(block.hashed)
                block.copies -= 1
                if not block.copies:
                    del self._blocks[name]
        self._drop(gone)


def _images(keys: list[Any] | None) -> str:
    """Return what identifies images and sounds in a block; "" for none."""
    return "\0".join(str(key) for key in keys or [] if not isinstance(key, str))


class KvCaches:
    """Follows the KV events of the instances of endpoints whose policy has `exact_prefixes`. Call `look` every second."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        *,
        session: Callable[[], aiohttp.ClientSession],
        owns: Callable[[], bool],
    ) -> None:
        self.topology, self.queue, self.session, self.owns = topology, queue, session, owns
        self.of: dict[Replica, KvCache] = {}
        """Caches of the instances that are followed."""
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Begin to follow instances that serve now, and stop with those that no longer do."""
        wanted = (
            {replica for replica in self.topology.replicas.values() if self._wants(replica)} if self.owns() else set()
        )
        for replica in [
            one for one, cache in self.of.items() if one not in wanted or cache.given != one.spec.kv_events
        ]:
            self._stop(replica)
        for replica in wanted - self.of.keys():
            cache = self.of[replica] = KvCache(self.queue, replica)
            self._tasks[replica] = asyncio.create_task(self._follow(replica, cache))
        for replica, cache in self.of.items():
            replica.cached_blocks, replica.cache_unknown = None if cache.why else cache.count, cache.unknown_because
        for replica, task in list(self._tasks.items()):
            if task.done():
                self._stop(replica)
                task.result()

    def close(self) -> None:
        for replica in list(self.of):
            self._stop(replica)

    @staticmethod
    def _wants(replica: Replica) -> bool:
        policy = replica.endpoint.spec.policy
        return policy.exact_prefixes and replica.spec.state in SERVING and bool(replica.spec.url)

    def _stop(self, replica: Replica) -> None:
        self._tasks.pop(replica).cancel()
        self.of.pop(replica).unknown("it is not followed")
        replica.cached_blocks, replica.cache_unknown = None, ""

    async def _follow(self, replica: Replica, cache: KvCache) -> None:
        """Find where *replica* publishes, and take in what comes."""
        while True:
            given = replica.spec.kv_events.split()
            known = [Source(*given)] if given else sources(replica.spec.url, await self._ask(replica))
            if len(known) == 1:
                break
            cache.unknown(f"it has {len(known)} engines" if known else "it publishes no KV events")
            await asyncio.sleep(ASK_AGAIN_S)
        cache.block_tokens = replica.metrics.block_size if replica.metrics else 0
        cache.unknown("its KV events are not reached")  # until they are
        cache.follower = Follower(known[0], cache.take)
        await cache.follower.run()

    async def _ask(self, replica: Replica) -> bytes:
        timeout = aiohttp.ClientTimeout(total=DISCOVER_S)
        key = {"Authorization": f"Bearer {replica.spec.api_key}"} if replica.spec.api_key else {}
        try:
            url = f"{replica.spec.url}/kv_event_sources"
            async with self.session().get(url, timeout=timeout, allow_redirects=False, headers=key) as response:
                return await response.read() if response.status == 200 else b"{}"
        except (aiohttp.ClientError, TimeoutError, OSError):
            return b"{}"
