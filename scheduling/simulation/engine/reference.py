"""The reference engine: continuous batching as in vLLM v1, one iteration at a time.

Plain Python, written for clarity rather than speed: the emulated servers run it in wall time, and the compiled simulator is
checked against it. The rules are those of vLLM 0.32's scheduler with its default settings (chunked prefill on, a waiting
request admitted only when all that it has to compute fits the free blocks, no watermark, no speculative decoding, no
asynchronous scheduling). A test runs both on the same requests and finds the same decisions in every iteration.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from scheduling.simulation.engine.block_pool import Block, BlockPool
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.engine.queues import QUEUES, QueueKey, WaitingQueue


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine sees it: its lengths; it stops after exactly *output_tokens*."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    """As in vLLM: lower is earlier. Read by the priority policy only."""
    arrival_s: float = 0.0
    prefix_hashes: tuple[Hashable, ...] = ()
    """One for each leading full block of the prompt that others may share; each identifies all tokens up to its end."""
    load_s: float = 0.0
    """Time to bring its LoRA adapter onto the GPU, by which the iteration that admits it is longer."""
    own: Hashable = None
    """Names its further tokens, for one that continues an earlier request of the same name; None: they are its alone."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration. Tokens come out at its end, `ends_s`; the engine's state is already that of the end."""

    ends_s: float
    duration_s: float
    emitted: list[str]
    """Requests that get one token each."""
    finished: list[str]
    """Those for which that was the last token."""
    admitted: list[str]
    """Requests that started to run, for the first time or again."""
    cached_tokens: dict[str, int]
    """Tokens of each of these that were in the prefix cache."""
    preempted: list[str]
    """Requests that lost their blocks and wait again."""
    prefill_tokens: int
    decode_sequences: int
    context_tokens: int
    """Tokens that the decoding sequences attend to, summed."""


class _Sequence:
    """A request in the engine, with its progress and its blocks."""

    __slots__ = (
        "blocks", "computed_tokens", "load_s", "number", "produced_tokens", "published", "request", "total_tokens",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, number: int) -> None:
        self.request = request
        self.number = number
        self.total_tokens = request.prompt_tokens  # prompt and output so far
        self.computed_tokens = 0  # of these, those whose KV is in the cache
        self.produced_tokens = 0
        self.blocks = 0
        self.load_s = request.load_s  # until it was loaded
        self.published: list[Block] = []  # its leading blocks that are full and findable; only with prefix caching

    @property
    def queue_key(self) -> QueueKey:
        return self.request.priority, self.request.arrival_s, self.number

    @property
    def decoding(self) -> bool:
        """Whether only the latest token is left to compute."""
        return self.produced_tokens > 0 and self.computed_tokens == self.total_tokens - 1

    def content(self, index: int) -> Hashable:
        """Return the content of the full block *index*: a hash that others may share, or tokens unique to this request."""
        hashes = self.request.prefix_hashes
        own = self.request.own
        return hashes[index] if index < len(hashes) else (self if own is None else own, index)


@dataclass(slots=True)
class _Batch:
    """An iteration being scheduled: tokens by sequence."""

    budget_tokens: int
    tokens: dict[_Sequence, int] = field(default_factory=dict)
    admitted: list[_Sequence] = field(default_factory=list)
    preempted: list[_Sequence] = field(default_factory=list)

    def schedule(self, sequence: _Sequence, tokens: int) -> None:
        self.tokens[sequence] = tokens
        self.budget_tokens -= tokens

    def unschedule(self, sequence: _Sequence) -> None:
        self.budget_tokens += self.tokens.pop(sequence, 0)


class ReferenceEngine:
    """One instance: `add` and `abort` requests at any time, and call `step` for as long as it has work."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.preemptions_total = 0
        self.prefix_queried_tokens_total = 0
        """Tokens of admitted requests that were looked up in the prefix cache, as vLLM counts them."""
        self.prefix_hit_tokens_total = 0
        self.restored_tokens_total = 0
        """Of the others, those that were restored from CPU memory,"""
        self.restore_s_total = 0.0
        """and the time that it took."""
        self._pool = BlockPool(config.kv_blocks)
        self._offloaded: OrderedDict[Hashable, None] = OrderedDict()  # blocks in CPU memory, least recently used first
        self._sequences: dict[str, _Sequence] = {}  # not finished, by request id
        self._running: dict[str, _Sequence] = {}  # in order of admission
        self._waiting: WaitingQueue = QUEUES[config.policy]()
        self._numbers = 0
        self._unread: dict[str, _Sequence] = {}  # in the front end, in order of arrival
        self._reads = 0  # of these, how many it reads by the end of the last step

    def watch(self, stored: Callable[[Hashable], None], removed: Callable[[Hashable], None]) -> None:
        """Call *stored* for each block that can be found from now on, and *removed* for each that no longer can."""
        self._pool.on_publish, self._pool.on_forget = stored, removed

    @property
    def running(self) -> int:
        """Requests that hold blocks and get tokens."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are read or preempted, and not admitted; as vLLM reports them, without those in the front end."""
        return len(self._waiting)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; as in vLLM return False, without effect, while requests hold blocks."""
        if self._running:
            return False
        self._pool.forget_idle()
        self._offloaded.clear()
        return True

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that are held, 0 to 1."""
        return 1.0 - self._pool.free / self._pool.capacity

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError, with the reason, if this engine could never run *request*."""
        if request.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, not {request.prompt_tokens}")
        if request.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, not {request.output_tokens}")
        length = request.prompt_tokens + request.output_tokens
        if length > self.config.max_model_len:
            raise ValueError(
                f"the request has {length} tokens ({request.prompt_tokens} in the prompt, {request.output_tokens} to"
                f" produce), more than max_model_len, {self.config.max_model_len}"
            )
        # The last token produced is never computed, so it needs no room.
        if self.config.blocks_for(length - 1) > self.config.kv_blocks:
            raise ValueError(
                f"the request needs {self.config.blocks_for(length - 1)} KV blocks of"
                f" {self.config.block_size_tokens} tokens; there are {self.config.kv_blocks}"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue *request*. Raise ValueError if it could never run, or if its id is in use."""
        self.check(request)
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id!r} is in the engine already")
        sequence = _Sequence(request, self._numbers)
        self._numbers += 1
        self._sequences[request.request_id] = sequence
        if self.config.front_end.requests_per_s < math.inf and (self._running or self._unread):
            self._unread[request.request_id] = sequence
        else:  # an idle server reads all at once
            self._waiting.push(request.request_id, sequence.queue_key)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; return False if it is not here (never was, or finished)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if self._running.pop(request_id, None) is not None:
            self._free(sequence)
        elif self._unread.pop(request_id, None) is None:
            self._waiting.remove(request_id)
        return True

    def step(self, now_s: float) -> StepResult | None:
        """Run one iteration that starts at *now_s*; return None if there is nothing to do.

        0. What the front end has read since the last iteration, in order of arrival, joins the queue.
        1. Running requests, in order of admission, each get a decode token or their next chunk of prefill, while the
           token budget lasts. One that needs a block when none is free takes it from a victim: the last admitted, or by
           priority the one with the last queue key. The victim loses its blocks and waits again.
        2. If none was preempted, waiting requests are admitted, in order, while the budget, `max_num_seqs` and the
           free blocks allow. The first that does not fit holds up the rest.
        3. Each request whose last known token was computed gets one more.

        A preempted request computes its prompt and its whole output again before its next token.
        """
        if not self._sequences:
            return None
        self._read()
        preempted: list[_Sequence] = []
        while True:
            batch = _Batch(self.config.max_num_batched_tokens)
            self._schedule_running(batch)
            if not batch.preempted:
                self._admit(batch)
            preempted += batch.preempted
            if batch.tokens:
                break
            # Every scheduled request was preempted. vLLM runs an empty iteration; as that takes no time, continue.
        return self._execute(batch, preempted, now_s)

    def _read(self) -> None:
        for request_id in list(self._unread)[: self._reads if self._running else None]:
            self._waiting.push(request_id, self._unread.pop(request_id).queue_key)

    def _schedule_running(self, batch: _Batch) -> None:
        for sequence in list(self._running.values()):
            if batch.budget_tokens == 0:
                return
            if sequence.request.request_id not in self._running:
                continue  # preempted for an earlier one
            tokens = min(sequence.total_tokens - sequence.computed_tokens, batch.budget_tokens)
            while not self._hold(sequence, sequence.computed_tokens + tokens):
                victim = self._victim()
                batch.unschedule(victim)
                batch.preempted.append(victim)
                self._preempt(victim)
                if victim is sequence:
                    return
            batch.schedule(sequence, tokens)

    def _admit(self, batch: _Batch) -> None:
        while batch.budget_tokens > 0 and len(self._waiting) > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._sequences[self._waiting.peek()]
            cached = self._cached(sequence)
            missing = self.config.blocks_for(sequence.total_tokens) - len(cached)
            if missing + self._pool.idle_among(cached) > self._pool.free:
                return
            self._waiting.remove(sequence.request.request_id)
            self._running[sequence.request.request_id] = sequence
            self._pool.share(cached)
            sequence.published = cached
            sequence.blocks = len(cached)
            sequence.computed_tokens = len(cached) * self.config.block_size_tokens
            if self.config.prefix_caching:
                self.prefix_queried_tokens_total += sequence.total_tokens
                self.prefix_hit_tokens_total += sequence.computed_tokens
            if self._offloaded:
                self._restore(sequence)
            tokens = min(sequence.total_tokens - sequence.computed_tokens, batch.budget_tokens)
            held = self._hold(sequence, sequence.computed_tokens + tokens)
            assert held, "the blocks were counted above"
            batch.admitted.append(sequence)
            batch.schedule(sequence, tokens)

    def _execute(self, batch: _Batch, preempted: list[_Sequence], now_s: float) -> StepResult:
        prefill_tokens = decode_sequences = context_tokens = 0
        load_s = sum(sequence.load_s for sequence in batch.admitted)
        for sequence in batch.admitted:
            sequence.load_s = 0.0
        emitted: list[str] = []
        finished: list[str] = []
        cached_tokens = {sequence.request.request_id: sequence.computed_tokens for sequence in batch.admitted}
        for sequence, tokens in batch.tokens.items():
            if sequence.decoding:
                decode_sequences += 1
                context_tokens += sequence.total_tokens
            else:
                prefill_tokens += tokens
            sequence.computed_tokens += tokens
            if sequence.computed_tokens == sequence.total_tokens:
                sequence.total_tokens += 1
                sequence.produced_tokens += 1
                emitted.append(sequence.request.request_id)
                if sequence.produced_tokens == sequence.request.output_tokens:
                    finished.append(sequence.request.request_id)
        for request_id in finished:
            del self._sequences[request_id]
            self._free(self._running.pop(request_id))
        front_end = self.config.front_end
        duration_s = load_s + max(
            self.config.profile.step_time_s(prefill_tokens, decode_sequences, context_tokens),
            front_end.time_s(len(emitted), min(1, len(self._unread))),
        )
        self._reads = front_end.reads(duration_s, len(emitted))
        return StepResult(
            ends_s=now_s + duration_s,
            duration_s=duration_s,
            emitted=emitted,
            finished=finished,
            admitted=[sequence.request.request_id for sequence in batch.admitted],
            cached_tokens=cached_tokens,
            preempted=[sequence.request.request_id for sequence in preempted],
            prefill_tokens=prefill_tokens,
            decode_sequences=decode_sequences,
            context_tokens=context_tokens,
        )

    def _restore(self, sequence: _Sequence) -> None:
        """Let *sequence*, just admitted, continue from its blocks in CPU memory, unless it is faster to compute them."""
        config, size = self.config, self.config.block_size_tokens
        first, count = sequence.computed_tokens // size, 0
        while first + count < (sequence.total_tokens - 1) // size:
            if sequence.content(first + count) not in self._offloaded:
                break
            count += 1
        missing = sequence.total_tokens - sequence.computed_tokens
        restored = count * size if config.regain(missing, count * size)[1] else 0
        if restored:
            seconds = config.restore_s + config.restore_s_per_token * restored
            sequence.load_s += seconds
            sequence.computed_tokens += restored
            self.restored_tokens_total += restored
            self.restore_s_total += seconds

    def _hold(self, sequence: _Sequence, tokens: int) -> bool:
        """Give *sequence* the blocks for its first *tokens*; return False when too few are free."""
        missing = self.config.blocks_for(tokens) - sequence.blocks
        if missing > 0:
            if not self._pool.take(missing):
                return False
            sequence.blocks += missing
        if self.config.prefix_caching:
            # Published before they are computed, as in vLLM: a request admitted in the same iteration can share them.
            for index in range(len(sequence.published), tokens // self.config.block_size_tokens):
                sequence.published.append(self._pool.publish(sequence.content(index)))
        return True

    def _cached(self, sequence: _Sequence) -> list[Block]:
        """Return cached blocks with the start of *sequence*; never all of it, for its last token must be computed."""
        if not self.config.prefix_caching:
            return []
        most = (sequence.total_tokens - 1) // self.config.block_size_tokens
        return self._pool.find(sequence.content(index) for index in range(most))

    def _victim(self) -> _Sequence:
        if self.config.policy == "priority":
            return max(self._running.values(), key=lambda sequence: sequence.queue_key)
        return next(reversed(self._running.values()))

    def _preempt(self, sequence: _Sequence) -> None:
        del self._running[sequence.request.request_id]
        self._free(sequence)
        self._waiting.push_back(sequence.request.request_id, sequence.queue_key)
        self.preemptions_total += 1

    def _free(self, sequence: _Sequence) -> None:
        if self.config.offload_blocks:
            for block in reversed(sequence.published):
                self._offloaded[block.content] = None
                self._offloaded.move_to_end(block.content)
                if len(self._offloaded) > self.config.offload_blocks:
                    self._offloaded.popitem(last=False)
        self._pool.give_back(sequence.blocks - len(sequence.published))
        self._pool.release(sequence.published)
        sequence.blocks = sequence.computed_tokens = 0
        sequence.published = []
