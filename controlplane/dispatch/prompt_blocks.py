"""Blocks of prompts whose tokens are known: those that instances have by their KV events, and those of running requests."""

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import kernels, port
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.stages import Stage
from controlplane.dispatch.waiting_queue import WaitingQueue

NO_BLOCKS = np.zeros(0, np.int64)


class PromptBlocks(Stage):
    def __init__(self, topology: Topology, queue: WaitingQueue) -> None:
        self.topology, self.queue = topology, queue

    def know(self, endpoint: Endpoint) -> bool:
        """Write how much of the first prompt that waits for *endpoint* its instances have cached, by their KV events.

        Return whether that is known of any.
        """
        request = self.queue.at(kernels.peek(self.queue.arrays, endpoint.index))
        hashes, size = _blocks_of(request), request.asked.token_block_size
        return hashes.size > 0 and bool(
            kernels.know(self.topology.arrays, self.queue.affinity, endpoint.index, hashes, 0, hashes.size, size)
        )

    def forget(self, endpoint: Endpoint) -> None:
        """Undo `know`."""
        kernels.forget_known(self.topology.arrays, self.queue.affinity, endpoint.index)

    def placed(self, request: Request, replica: Replica) -> None:
        """Count its blocks as cached there until it leaves, if that is known of others there."""
        hashes = _blocks_of(request)
        if hashes.size and self.queue.affinity.blocks.block_tokens[replica.slot] == request.asked.token_block_size:
            self.queue.fit_blocks(hashes.size)
            kernels.hold_blocks(self.queue.affinity.blocks, replica.slot, hashes, 0, hashes.size)
            request.blocks = hashes

    def withdrawn(self, request: Request) -> None:
        if request.replica is not None and request.blocks is not None:
            blocks, slot = self.queue.affinity.blocks, request.replica.slot
            kernels.drop_blocks(blocks, slot, request.blocks, 0, request.blocks.size)
            request.blocks = None

    def tokenizer(self, model: str) -> port.Tokenizer | None:
        """Return the least busy instance of *model* whose cache is known by its KV events, if there is another to choose."""
        fleet, sizes = self.topology.fleet, self.queue.affinity.blocks.block_tokens
        if not sizes.any():
            return None
        known = [
            one
            for one in self.topology.replicas.values()
            if one.spec.model == model and one.slot < sizes.size and sizes[one.slot] and fleet.accepting[one.slot]
        ]
        if len(known) < 2:
            return None
        least = min(known, key=lambda one: (fleet.running[one.slot], one.slot))
        saves_s = least.spec.profile.prefill_b_s_per_token if least.spec.profile else 0.0
        return port.Tokenizer(model, int(sizes[least.slot]), least.spec.url, least.spec.api_key, saves_s)


def _blocks_of(request: Request) -> NDArray[np.int64]:
    """Return the hashes of the full blocks of its prompt, where its tokens are known."""
    known = request.asked.token_blocks
    return np.frombuffer(bytearray(known), np.int64) if known else NO_BLOCKS  # writable, as kernels expect
