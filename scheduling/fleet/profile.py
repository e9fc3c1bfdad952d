"""Duration of an engine step: the profile of a model on a GPU type at a tensor parallel degree.

Prefill of p tokens takes `max(t0, a + b·p + c·p²)` seconds, decoding `a + b·batch + c·context`, where batch counts
sequences and context the tokens that they attend to. The form fits published measurements within 1% to 6% (a few
models, prompts up to 8,192 tokens, held-out configurations).
"""

import math
from dataclasses import dataclass, fields
from typing import Final

from scheduling.compiled import compiled, uncompiled


@compiled
def step_time_s(
    prefill_t0_s: float,
    prefill_a_s: float,
    prefill_b_s_per_token: float,
    prefill_c_s_per_token2: float,
    decode_a_s: float,
    decode_b_s_per_sequence: float,
    decode_c_s_per_token: float,
    prefill_tokens: int,
    decode_sequences: int,
    context_tokens: int,
) -> float:
    """Return the seconds of one engine step that prefills *prefill_tokens* and decodes
    one token per *decode_sequences*.

    *context_tokens* is the sum, over the decoding sequences, of prompt and output so far. A step with both kinds
    of work is one forward pass: its fixed part is paid once, by the prefill, and decoding adds only its marginal
    cost. An empty step takes no time.
    """
    decode_s = decode_b_s_per_sequence * decode_sequences + decode_c_s_per_token * context_tokens
    if prefill_tokens > 0:
        tokens = float(prefill_tokens)
        prefill_s = prefill_a_s + prefill_b_s_per_token * tokens + prefill_c_s_per_token2 * tokens * tokens
        return max(prefill_t0_s, prefill_s) + decode_s
    if decode_sequences > 0:
        return decode_a_s + decode_s
    return 0.0


@compiled
def service_time_s(
    prefill_t0_s: float,
    prefill_a_s: float,
    prefill_b_s_per_token: float,
    prefill_c_s_per_token2: float,
    decode_a_s: float,
    decode_b_s_per_sequence: float,
    decode_c_s_per_token: float,
    prompt_tokens: int,
    output_tokens: int,
) -> float:
    """Return the seconds that a request takes alone on an instance: one prefill of its prompt and its decode steps.

    The prefill gives the first token, each further step one more, over a context that grows by one.
    """
    prompt, steps = float(prompt_tokens), float(output_tokens - 1)
    prefill_s = prefill_a_s + prefill_b_s_per_token * prompt + prefill_c_s_per_token2 * prompt * prompt
    contexts = steps * prompt + steps * (steps + 1.0) / 2.0
    return (
        max(prefill_t0_s, prefill_s) + (decode_a_s + decode_b_s_per_sequence) * steps + decode_c_s_per_token * contexts
    )


BUSY_SEQUENCES: Final = 32
"""Typical batch of an instance while requests wait for it."""


@compiled
def decode_time_s(
    decode_a_s: float,
    decode_b_s_per_sequence: float,
    decode_c_s_per_token: float,
    prompt_tokens: int,
    output_tokens: int,
) -> float:
    """Return the seconds from a request's first token to its last, among `BUSY_SEQUENCES` like it."""
    steps = float(output_tokens - 1)
    of_one_s = decode_b_s_per_sequence + decode_c_s_per_token * (prompt_tokens + 0.5 * output_tokens)
    return steps * (decode_a_s + BUSY_SEQUENCES * of_one_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of the step time; only `prefill_a_s` may be negative. Raises ValueError naming an invalid one."""

    prefill_t0_s: float
    prefill_a_s: float
    prefill_b_s_per_token: float
    prefill_c_s_per_token2: float
    decode_a_s: float
    decode_b_s_per_sequence: float
    decode_c_s_per_token: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or (value < 0 and field.name != "prefill_a_s"):
                raise ValueError(f"{field.name} must be a finite number of at least 0, not {value!r}")
        if self.step_time_s(1, 0, 0) <= 0:
            raise ValueError("the prefill coefficients give a step of one token no time")
        if self.step_time_s(0, 1, 1) <= 0:
            raise ValueError("the decode coefficients give a step of one sequence no time")

    def step_time_s(self, prefill_tokens: int, decode_sequences: int, context_tokens: int) -> float:
        """Return the seconds of one engine step; see the kernel of the same name."""
        return uncompiled(step_time_s)(
            self.prefill_t0_s,
            self.prefill_a_s,
            self.prefill_b_s_per_token,
            self.prefill_c_s_per_token2,
            self.decode_a_s,
            self.decode_b_s_per_sequence,
            self.decode_c_s_per_token,
            prefill_tokens,
            decode_sequences,
            context_tokens,
        )

    def decode_time_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the seconds from the first token to the last on a busy instance; see the kernel of the same name."""
        return uncompiled(decode_time_s)(
            self.decode_a_s, self.decode_b_s_per_sequence, self.decode_c_s_per_token, prompt_tokens, output_tokens
        )

    def service_time_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the seconds that a request takes alone; see the kernel of the same name."""
        return uncompiled(service_time_s)(
            self.prefill_t0_s,
            self.prefill_a_s,
            self.prefill_b_s_per_token,
            self.prefill_c_s_per_token2,
            self.decode_a_s,
            self.decode_b_s_per_sequence,
            self.decode_c_s_per_token,
            prompt_tokens,
            output_tokens,
        )


USUAL = Profile(0.02, 0.0, 1e-4, 0.0, 0.02, 0.0, 0.0)
"""Default without a measurement: an 8B model on a data centre GPU. Only for comparing requests with each other."""
