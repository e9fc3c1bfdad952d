"""One emulated server: the reference engine stepped in wall time, and vLLM's behaviour around its engine.

A step's tokens are handed out when the step has taken its time: the loop sleeps until then, by the step's planned end and
not by its length, so that late timers do not add up. A server that falls more than a second behind (the machine is too
slow for this fleet) gives the lost time up instead of catching up in a burst.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.engine.reference import EngineRequest, ReferenceEngine, StepResult
from workers.emulator.adapters import AdapterCache
from workers.emulator.answers import Answer, Sequence
from workers.emulator.calls import ApiError
from workers.emulator.content import Content
from workers.emulator.kv_events import PromptBlock, Publisher
from workers.emulator.metrics import Metrics
from workers.emulator.spec import InstanceSpec

log = logging.getLogger(__name__)

_clock = time.monotonic
GIVE_UP_S = 1.0
SHORTEST_SLEEP_S = 0.0005

State = Literal["starting", "ready", "sleeping", "crashed", "hung"]
FaultKind = Literal["crash", "hang", "slow", "slow_metrics", "errors", "garbled", "none"]
SleepMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a server.

    `factor` stretches its steps, or is the delay of its metrics in seconds; `ratio` is the share of its requests that get
    a 500, or bytes that are no answer.
    """

    kind: FaultKind = "none"
    factor: float = 1.0
    ratio: float = 0.0


class EmulatedInstance:
    """One server. Call `start` in a running event loop, `close` at the end."""

    def __init__(self, name: str, spec: InstanceSpec, seed: int = 0) -> None:
        self.name = name
        self.spec = spec
        self.fault = Fault()
        self.adapters = AdapterCache(spec.max_loras, spec.max_cpu_loras, spec.adapter_storage_s, spec.adapter_memory_s)
        self.created_s = int(time.time())
        self._content = Content(name, spec, seed)
        self._task: asyncio.Task[None] | None = None
        self._recovery: asyncio.TimerHandle | None = None
        self._awake = asyncio.Event()  # the engine may step
        self._responsive = asyncio.Event()  # not hung
        self._work = asyncio.Event()
        self._between_steps = asyncio.Event()
        self._ready = False
        self._crashed = False
        publishes = spec.enable_kv_cache_events and spec.enable_prefix_caching and not spec.task.pools
        self.kv_events = Publisher(spec.block_size_tokens) if publishes else None
        self._reset()

    def _reset(self) -> None:
        """Begin as a new process: nothing of the one before is left."""
        spec = self.spec
        self.metrics = Metrics(spec)
        self._engine = ReferenceEngine(
            EngineConfig(
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                block_size_tokens=spec.block_size_tokens,
                kv_blocks=spec.kv_blocks,
                policy=spec.scheduling_policy,
                # The token that ends a prompt without output is no part of its length.
                max_model_len=spec.max_model_len + spec.task.pools,
                profile=spec.profile,
                front_end=spec.front_end,
                prefix_caching=spec.enable_prefix_caching,
                offload_blocks=spec.offload_blocks,
                restore_s=spec.restore_s,
                restore_s_per_token=spec.restore_s_per_token,
            )
        )
        if self.kv_events is not None:
            self._engine.watch(self.kv_events.stored, self.kv_events.removed)
        self._sequences: dict[str, Sequence] = {}
        self._held: list[Sequence] = []  # arrived while the server drains for, or is in, its sleep
        self._holding = False
        self._asleep_tags: set[str] = set()
        self._recomputed = 0  # preemptions by a sleep, which the engine does not know of
        self._last_step_end_s = -1.0
        self.adapters.clear()
        self._awake.set()
        self._responsive.set()
        self._work.clear()

    # Life

    def start(self) -> None:
        """Begin to load; the server answers after its start-up time."""
        self._ready = self._crashed = False
        self.created_s = int(time.time())
        if self.kv_events is not None:
            self.kv_events.start()
        self._task = asyncio.create_task(self._run(), name=f"emulated {self.name}")

    async def close(self) -> None:
        """End as a killed process does: connections are cut."""
        if self._recovery is not None:
            self._recovery.cancel()
        self._crash()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def state(self) -> State:
        if self._crashed:
            return "crashed"
        if not self._ready:
            return "starting"
        if self.fault.kind == "hang":
            return "hung"
        return "sleeping" if self.asleep else "ready"

    @property
    def listening(self) -> bool:
        """False while a connection to a real server would be refused."""
        return self._ready and not self._crashed

    async def responsive(self) -> None:
        """Wait while the server hangs: it accepts connections and answers nothing."""
        await self._responsive.wait()

    def set_fault(self, fault: Fault, for_s: float | None = None) -> None:
        """Inject *fault*, or repair ("none"), for *for_s* seconds or until the next call. A crashed one is started."""
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None
        self.fault = fault
        if fault.kind == "crash":
            self._crash()
        elif self._crashed:
            self._reset()
            self.start()
        if fault.kind == "hang":
            self._responsive.clear()
        else:
            self._responsive.set()
        if for_s is not None and fault.kind != "none":
            self._recovery = asyncio.get_running_loop().call_later(for_s, self.set_fault, Fault())

    def _crash(self) -> None:
        self._crashed = True
        self._between_steps.set()
        if self.kv_events is not None:
            self.kv_events.close()
        if self._task is not None:
            self._task.cancel()
        for answer in {sequence.answer for sequence in (*self._sequences.values(), *self._held)}:
            answer.cut()
        self._sequences.clear()
        self._held.clear()

    # Requests

    def admit(self, sequences: int) -> None:
        """Apply vLLM's `--max-num-queued-reqs`, running requests included. Raises ApiError beyond the limit."""
        limit = self.spec.max_num_queued_reqs
        if limit is not None and self.unfinished + sequences > limit:
            self.metrics.rejected += 1
            raise ApiError(
                503,
                "Service Unavailable",
                "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
                "instance.",
            )

    @property
    def unfinished(self) -> int:
        return len(self._sequences) + len(self._held)

    def submit(self, answer: Answer) -> None:
        """Hand a request to the engine; *answer* gets its tokens."""
        arrival_s = _clock()
        answer.reports_cached = self.spec.enable_prompt_tokens_details
        asked = answer.asked
        sequences = [
            self._content.sequence(answer, number * asked.n + choice, prompt, asked.max_tokens[number], arrival_s)
            for number, prompt in enumerate(asked.prompts)
            for choice in range(asked.n)
        ]
        answer.begin(sequences)
        for sequence in sequences:
            if self._holding:
                self._held.append(sequence)
            else:
                self._enqueue(sequence)

    def withdraw(self, answer: Answer) -> None:
        """Free everything that the request holds: the caller has left. No error if it is complete."""
        for sequence in answer.sequences:
            if self._sequences.pop(sequence.engine_id, None) is not None:
                self._engine.abort(sequence.engine_id)
        if self._held:
            self._held = [sequence for sequence in self._held if sequence.answer is not answer]
        answer.sequences.clear()  # cuts the ring of references: prompts must not wait for the garbage collector
        if not self.asleep:
            self._note_gauges()

    def _enqueue(self, sequence: Sequence) -> None:
        self._sequences[sequence.engine_id] = sequence
        self._engine.add(
            EngineRequest(
                request_id=sequence.engine_id,
                prompt_tokens=max(1, sequence.prompt.tokens + sequence.produced),
                output_tokens=sequence.output_tokens - sequence.produced,
                priority=sequence.answer.asked.get("priority", 0),
                arrival_s=sequence.arrival_s,
                load_s=self.adapters.use(sequence.answer.model),
                prefix_hashes=self._blocks(sequence) if self.spec.enable_prefix_caching else (),
                own=sequence.own if self.spec.offload_blocks else None,
            )
        )
        self._work.set()

    def _blocks(self, sequence: Sequence) -> tuple[PromptBlock, ...]:
        asked, model = sequence.answer.asked, sequence.answer.model
        adapter = model if model != self.spec.model else ""
        return sequence.prompt.blocks(self.spec.block_size_tokens, adapter, asked.get("cache_salt", ""))

    # Sleep

    @property
    def asleep(self) -> bool:
        return bool(self._asleep_tags)

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Emulate vLLM's `/sleep`. *mode*: abort running requests, wait for their end, or keep them.

        Requests that arrive later wait until the server is woken, and do not show in its gauges.
        """
        self._holding = True
        if mode == "abort":
            self._abort_all()
        elif mode == "wait":
            await self._drained()
        self._asleep_tags = {"scheduling"} if level == 0 else {"weights", "kv_cache"}
        self._awake.clear()
        await self._between_steps.wait()  # the step that runs now hands out its tokens first
        if level > 0:
            self._recompute_all()
            self.reset_prefix_cache()
        if level == 1:
            await asyncio.sleep(self.spec.sleep_s)
        self.metrics.sleep_level = level

    async def _drained(self) -> None:
        """Wait until nothing runs. If the caller gives up, the server stays awake."""
        try:
            while self._sequences:
                await asyncio.wait({sequence.answer.done for sequence in self._sequences.values()})
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._release()
            raise

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Emulate vLLM's `/wake_up`: wake all parts, or only *tags*; return whether everything is awake."""
        if "weights" in self._asleep_tags & set(tags or self._asleep_tags) and self.metrics.sleep_level == 1:
            await asyncio.sleep(self.spec.wake_s)
        self._asleep_tags -= set(tags) if tags is not None else set(self._asleep_tags)
        if not self._asleep_tags:
            self.metrics.sleep_level = None
            self._awake.set()
            self._release()
        return not self._asleep_tags

    async def reload_weights(self) -> None:
        """Emulate vLLM's `reload_weights`, for weights that level 2 discarded."""
        await asyncio.sleep(self.spec.reload_s)

    def reset_prefix_cache(self) -> bool:
        cleared = self._engine.reset_prefix_cache()
        if cleared and self.kv_events is not None:
            self.kv_events.cleared()
        return cleared

    def _release(self) -> None:
        """Enqueue the requests that arrived meanwhile."""
        self._holding = False
        held, self._held = self._held, []
        for sequence in held:
            self._enqueue(sequence)

    def _abort_all(self) -> None:
        """End every request with its tokens so far and the reason "abort"."""
        for sequence in list(self._sequences.values()):
            self._engine.abort(sequence.engine_id)
            sequence.finish_reason, sequence.stop_reason = "abort", None
            sequence.answer.aborted(sequence)
            self._end(sequence, _clock())
        self._note_gauges()

    def _recompute_all(self) -> None:
        """Restart running requests from their prompt and tokens, as after preemption: sleep freed the KV cache."""
        for sequence in self._sequences.values():
            if sequence.produced:
                sequence.preemptions += 1
                self._recomputed += 1
            self._engine.abort(sequence.engine_id)
            self._enqueue(sequence)

    # The loop

    async def _run(self) -> None:
        await asyncio.sleep(self.spec.startup_s)
        self._ready = True
        now_s = _clock()
        try:
            while True:
                self._between_steps.set()
                await self._awake.wait()
                await self._responsive.wait()
                step = self._engine.step(now_s)
                if step is None:
                    self._note_gauges()
                    self._work.clear()
                    await self._work.wait()
                    now_s = max(now_s, _clock())
                    continue
                self._between_steps.clear()
                self._note_step(step, now_s)
                now_s = await self._until(now_s + step.duration_s * self.fault.factor)
                self._hand_out(step)
        except Exception:
            # A defect of the engine looks from outside like a crashed server, and is logged.
            log.exception("emulated instance %s stopped", self.name)
            self._crash()

    async def _until(self, end_s: float) -> float:
        """Sleep until *end_s*; return the time at which the next step begins."""
        left_s = end_s - _clock()
        await asyncio.sleep(left_s if left_s > SHORTEST_SLEEP_S else 0)
        await self._responsive.wait()
        late_s = _clock() - end_s
        return end_s if late_s < GIVE_UP_S else end_s + late_s

    def _note_step(self, step: StepResult, now_s: float) -> None:
        """Record the start of a step: admitted and preempted requests, and the gauges."""
        for request_id in step.admitted:
            sequence = self._sequences[request_id]
            if sequence.admitted_s is None:
                sequence.admitted_s = max(now_s, sequence.arrival_s)
                sequence.cached_tokens = step.cached_tokens[request_id]
        for request_id in step.preempted:
            self._sequences[request_id].preemptions += 1
        if self.kv_events is not None:
            self.kv_events.publish()
        self._note_gauges(len(step.finished))

    def _hand_out(self, step: StepResult) -> None:
        """Give each request its token and close those that are complete."""
        metrics = self.metrics
        sequences = self._sequences
        now_s = _clock()
        previous_s, self._last_step_end_s = self._last_step_end_s, now_s
        same = 0  # sequences that also had a token in the step before: their gap is the same
        for request_id in step.emitted:
            sequence = sequences.get(request_id)
            if sequence is None:
                continue  # left while the step ran
            if sequence.last_token_s == previous_s:
                same += 1
            elif sequence.produced:
                metrics.observe("inter_token_latency_seconds", now_s - sequence.last_token_s)
            else:
                sequence.first_token_s = now_s
                metrics.observe("time_to_first_token_seconds", now_s - sequence.arrival_s)
                metrics.prompt_tokens += sequence.prompt.tokens
            sequence.last_token_s = now_s
            sequence.answer.token(sequence)
        if same:
            metrics.observe("inter_token_latency_seconds", now_s - previous_s, same)
        for request_id in step.finished:
            if request_id in sequences:
                self._end(sequences[request_id], now_s)
        metrics.generation_tokens += 0 if self.spec.task.pools else len(step.emitted)
        metrics.observe("iteration_tokens_total", step.prefill_tokens + step.decode_sequences)
        self._note_gauges()

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """Count a sequence that is complete (or aborted) and end its answer."""
        self._sequences.pop(sequence.engine_id, None)
        self.metrics.sequence_ended(sequence, now_s)
        sequence.answer.ended(sequence)

    def _note_gauges(self, finishing: int = 0) -> None:
        """Set the gauges, as vLLM does once a step; *finishing* requests end with the current step."""
        metrics, engine = self.metrics, self._engine
        metrics.running = engine.running + finishing
        metrics.waiting = engine.waiting
        metrics.kv_usage = engine.kv_usage
        metrics.preemptions = engine.preemptions_total + self._recomputed
        metrics.prefix_queries = engine.prefix_queried_tokens_total
        metrics.prefix_hits = engine.prefix_hit_tokens_total
        metrics.restored_tokens, metrics.restore_s = engine.restored_tokens_total, engine.restore_s_total
