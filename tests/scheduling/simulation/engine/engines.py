"""A profile that can be worked out in the head, and shorthands for engines on it."""

from scheduling.fleet.profile import Profile
from scheduling.simulation.engine.block_pool import BlockPool
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest

# Prefill of p tokens: 1 + 0.01 p. Decode: 0.5 + 0.1 a sequence + 0.001 a token of context. Seconds.
EASY = Profile(
    prefill_t0_s=0.0,
    prefill_a_s=1.0,
    prefill_b_s_per_token=0.01,
    prefill_c_s_per_token2=0.0,
    decode_a_s=0.5,
    decode_b_s_per_sequence=0.1,
    decode_c_s_per_token=0.001,
)


def config(**settings) -> EngineConfig:
    """Return an engine with plenty of everything, except for *settings*."""
    plenty = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1000,
        "block_size_tokens": 4,
        "kv_blocks": 1000,
        "policy": "fcfs",
        "max_model_len": 1000,
        "profile": EASY,
    }
    return EngineConfig(**(plenty | settings))


def idle_contents(pool: BlockPool) -> list:
    """Return the contents of the idle blocks in order of reuse."""
    return [block.content for block in pool._idle]


def request(request_id: str, prompt_tokens: int, output_tokens: int, **more) -> EngineRequest:
    return EngineRequest(request_id, prompt_tokens, output_tokens, **more)
