"""What an emulated server says to a prompt: where in the prose an answer begins, how long it is, and what ends it."""

import uuid

import orjson

from workers.emulator import requested_length, text
from workers.emulator.protocol.answers import Answer, Sequence
from workers.emulator.protocol.generation import Generation, Prompt, Tool
from workers.emulator.protocol.schema import example
from workers.emulator.spec import InstanceSpec


class Content:
    """The answers of one server, which survive its crashes: its own series of draws goes on."""

    def __init__(self, name: str, spec: InstanceSpec, seed: int) -> None:
        self._spec = spec
        self._seed = text.mixed(seed if spec.seed is None else spec.seed, *name.encode())
        self._model_seed = text.mixed(0, *spec.model.encode())  # a prompt asks the same of a model on all servers
        self._drawn = 0

    def sequence(self, answer: Answer, index: int, prompt: Prompt, max_tokens: int, arrival_s: float) -> Sequence:
        """Decide what sequence *index* of *answer* will say, and how much of it."""
        generation = answer.generation
        said, following = text.answered_before(prompt.ids) if prompt.ids is not None else (0, 0)
        if said and prompt.ids is not None and said < len(prompt.ids):
            number, wanted = self._draw(generation, Prompt("", prompt.ids[:-said]), index)
            wanted = max(1, wanted - said)
        else:
            said = 0
            number, wanted = self._draw(generation, prompt, index)
        tool = _called(generation, number)
        formed = tool.parameters if tool else generation.schema
        if formed is not None:
            pieces = text.pieces_of(orjson.dumps(example(formed, number)).decode())
            return Sequence(
                engine_id=uuid.uuid4().hex,
                answer=answer,
                index=index,
                prompt=prompt,
                max_tokens=max_tokens,
                output_tokens=min(len(pieces), max_tokens),
                offset=0,
                finish_reason="stop" if len(pieces) <= max_tokens else "length",
                stop_reason=None,
                pieces=pieces,
                arrival_s=arrival_s,
                tool=tool.name if tool else "",
                call_id=f"chatcmpl-tool-{uuid.uuid4().hex[:16]}" if tool else "",
            )
        offset = following if said else number % len(text.WORDS)
        count, finish_reason = max_tokens, "length"
        if not generation.ignore_eos and max(wanted, generation.min_tokens) < max_tokens:
            count, finish_reason = max(wanted, generation.min_tokens, 1), "stop"
        stopped = None
        if generation.stop:
            shown = count - (finish_reason == "stop")  # the end-of-sequence token has no text
            stopped = text.cut_at_stop(offset, shown, generation.stop, generation.min_tokens, generation.include_stop)
        return Sequence(
            engine_id=uuid.uuid4().hex,
            answer=answer,
            index=index,
            prompt=prompt,
            max_tokens=max_tokens,
            output_tokens=len(stopped[0]) if stopped else count,
            offset=offset,
            finish_reason="stop" if stopped else finish_reason,
            stop_reason=stopped[1] if stopped else None,
            pieces=stopped[0] if stopped else None,
            arrival_s=arrival_s,
            goes_on=said > 0,
        )

    def _draw(self, generation: Generation, prompt: Prompt, index: int) -> tuple[int, int]:
        """The number that decides what is said, and the answer's length in tokens when nothing cuts it.

        With a seed or temperature 0 the same prompt gives the same answer; otherwise the next number of this server's
        own series decides, so that a run can be repeated.
        """
        if generation.greedy or generation.seed is not None:
            number = text.mixed(self._seed, prompt.digest, generation.seed or 0, index)
        else:
            self._drawn += 1
            number = text.mixed(self._seed, prompt.digest, self._drawn, index)
        requested = requested_length.read(prompt.text, prompt.tokens) if prompt.ids is None else None
        if requested is not None:
            length = requested_length.draw(requested, text.mixed(self._model_seed, prompt.digest), number)
        else:
            length = text.output_tokens(number, self._spec.output_median_tokens, self._spec.output_sigma)
        return number, length


def _called(generation: Generation, number: int) -> Tool | None:
    """The tool that an answer calls; where the choice is free, half of the answers call one."""
    if not generation.tools or (not generation.must_call and number % 2):
        return None
    return generation.tools[(number >> 1) % len(generation.tools)]
