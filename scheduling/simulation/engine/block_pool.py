"""KV cache of one engine: a pool of blocks, some of which keep a prefix that a later prompt may share.

A block is *blank* (free and empty), *held* (by one request or by several that share it), or *idle* (free, but its full block
of tokens can still be found by content until the room is needed). Blank blocks are given out first, then idle ones, freed
longest ago first. As in vLLM v1, two requests that compute the same block at the same time keep one copy each.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import takewhile


class Block:
    """A full block of tokens that can be found by its content."""

    __slots__ = ("content", "holders")

    def __init__(self, content: Hashable) -> None:
        self.content = content
        self.holders = 1


class BlockPool:
    """*capacity* blocks, all blank. Without `publish` it only counts, which suffices for an engine without prefix cache."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.on_publish: Callable[[Hashable], None] | None = None
        self.on_forget: Callable[[Hashable], None] | None = None
        self._blank = capacity
        self._idle: dict[Block, None] = {}  # freed longest ago first
        self._by_content: dict[Hashable, dict[Block, None]] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self._blank + len(self._idle)

    def take(self, count: int) -> bool:
        """Hold *count* more blocks; return False, and hold none, when fewer are free."""
        if count > self.free:
            return False
        from_idle = count - self._blank
        if from_idle <= 0:
            self._blank -= count
            return True
        self._blank = 0
        for _ in range(from_idle):
            self._forget(next(iter(self._idle)))
        return True

    def give_back(self, count: int) -> None:
        """Free *count* held blocks that were not published."""
        self._blank += count

    def publish(self, content: Hashable) -> Block:
        """Make one held block, now full, findable by *content*, which must identify all tokens up to the block's end."""
        block = Block(content)
        self._by_content.setdefault(content, {})[block] = None
        if self.on_publish is not None:
            self.on_publish(content)
        return block

    def find(self, contents: Iterable[Hashable]) -> list[Block]:
        """Return the longest leading run of blocks that hold *contents*."""
        copies: Iterator[dict[Block, None]] = (self._by_content.get(content, {}) for content in contents)
        return [next(iter(blocks)) for blocks in takewhile(bool, copies)]

    def idle_among(self, blocks: Iterable[Block]) -> int:
        """Return how many of *blocks* have no holder: sharing these costs free blocks."""
        return sum(block.holders == 0 for block in blocks)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add one holder to each of *blocks*."""
        for block in blocks:
            if block.holders == 0:
                del self._idle[block]
            block.holders += 1

    def release(self, blocks: list[Block]) -> None:
        """Remove one holder from each of *blocks*, a request's published blocks in order: its last will be reused first."""
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders == 0:
                self._idle[block] = None

    def forget_idle(self) -> None:
        """Make all idle blocks blank."""
        for block in list(self._idle):
            self._forget(block)
            self._blank += 1

    def _forget(self, block: Block) -> None:
        del self._idle[block]
        copies = self._by_content[block.content]
        del copies[block]
        if not copies:
            del self._by_content[block.content]
        if self.on_forget is not None:
            self.on_forget(block.content)
