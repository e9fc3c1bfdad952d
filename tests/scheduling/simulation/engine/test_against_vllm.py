"""The reference engine against vLLM's own scheduler: the same decisions in every iteration of random scenarios."""

import json
import os
import random
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from scheduling.simulation.engine.reference import EngineRequest, ReferenceEngine
from tests.scheduling.simulation.engine.engines import config

ROOT = Path(__file__).parents[4]
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
SCENARIOS = 600

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not VLLM_PYTHON.exists() and not os.environ.get("REQUIRE_VLLM"),
        reason=f"no vLLM at {VLLM_PYTHON}: run `make vllm`",
    ),
]


def scenario(seed: int) -> dict:
    """Return a scenario: light or overloaded, with ample or scarce KV blocks; arrivals by iteration, without a clock."""
    draw = random.Random(seed)
    block_size_tokens = draw.choice([2, 4, 16])
    max_num_seqs = draw.choice([1, 2, 4, 8, 16])
    longest = draw.choice([12, 40])
    kv_blocks = draw.choice([1, 1.5, 2.5, 10]) * (2 * longest // block_size_tokens + 1)
    spread = draw.choice([0, 10, 60])
    requests = []
    for number, before_step in enumerate(sorted(draw.randint(0, spread) for _ in range(draw.randint(1, 30)))):
        prompt_tokens = draw.randint(1, longest)
        common, family = draw.randint(0, prompt_tokens // block_size_tokens), draw.randint(0, 2)
        requests.append(
            {
                "request_id": f"r{number}",
                "prompt_tokens": prompt_tokens,
                "output_tokens": draw.randint(1, longest),
                "priority": draw.randint(-1, 1),
                "arrival_s": float(number),  # vLLM breaks ties of arrival by id, the engine by order of arrival
                "prefix_hashes": [(family, index) for index in range(common)],
                "before_step": before_step,
            }
        )
    return {
        "config": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + draw.choice([0, 5, 40, 200]),
            "block_size_tokens": block_size_tokens,
            "kv_blocks": int(kv_blocks),
            "policy": draw.choice(["fcfs", "priority"]),
            "max_model_len": 1000,
            "prefix_caching": draw.random() < 0.5,
        },
        "requests": requests,
    }


CONVERSATIONS, CALLS, BLOCK_TOKENS, LAST_TOKENS = 32, 10, 16, 960
WORKING_SET_TOKENS = CONVERSATIONS * LAST_TOKENS


def conversations(pool_share: float) -> dict:
    """Return conversations whose prompts grow by 96 tokens a call, all of one tenth in a random order, a call after
    the other, with *pool_share* times the memory that holds them all.
    """
    draw, requests = random.Random(28), []
    for call in range(CALLS):
        for place, which in enumerate(draw.sample(range(CONVERSATIONS), CONVERSATIONS)):
            prompt_tokens = LAST_TOKENS * (call + 1) // CALLS
            requests.append(
                {
                    "request_id": f"r{len(requests):03}",
                    "prompt_tokens": prompt_tokens,
                    "output_tokens": 8,
                    "priority": 0,
                    "arrival_s": float(len(requests)),
                    "prefix_hashes": [(which, index) for index in range(prompt_tokens // BLOCK_TOKENS)],
                    "before_step": 400 * call + 2 * place,
                }
            )
    return {
        "config": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "block_size_tokens": BLOCK_TOKENS,
            "kv_blocks": int(pool_share * WORKING_SET_TOKENS / BLOCK_TOKENS),
            "policy": "fcfs",
            "max_model_len": 1000,
            "prefix_caching": True,
        },
        "requests": requests,
    }


POOL_SHARES = (1.4, 0.7, 0.35)


def run(asked: dict) -> list[dict]:
    engine = ReferenceEngine(config(**asked["config"]))
    to_come = list(asked["requests"])
    steps: list[dict] = []
    while to_come or engine.running or engine.waiting:
        while to_come and (to_come[0]["before_step"] <= len(steps) or not (engine.running or engine.waiting)):
            fields = {name: value for name, value in to_come.pop(0).items() if name != "before_step"}
            engine.add(EngineRequest(**fields | {"prefix_hashes": tuple(fields["prefix_hashes"])}))
        result = asdict(engine.step(0.0))
        del result["ends_s"], result["duration_s"], result["cached_tokens"]
        steps.append(result | {"running": engine.running, "waiting": engine.waiting, "kv_usage": engine.kv_usage})
    return steps


def comparable(step: dict) -> dict:
    """Remove what has no order in both engines: which request was preempted first. KV use as floats allow."""
    return step | {"preempted": sorted(step["preempted"]), "kv_usage": round(step["kv_usage"], 9)}


def test_every_iteration_is_vllms():
    """C28: with conversations that fit into the prefix cache, that do not, and that fill it thrice."""
    scenarios = [scenario(seed) for seed in range(SCENARIOS)] + [conversations(share) for share in POOL_SHARES]
    done = subprocess.run(
        [VLLM_PYTHON, Path(__file__).with_name("vllm_scheduler.py")],
        input=json.dumps(scenarios),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = preemptions = 0
    computed = []
    for seed, (asked, theirs) in enumerate(zip(scenarios, json.loads(done.stdout), strict=True)):
        ours = run(asked)
        for number, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
            assert comparable(our_step) == comparable(their_step), f"scenario {seed}, iteration {number}"
        assert len(ours) == len(theirs), f"scenario {seed}"
        steps += len(ours)
        computed.append(sum(step["prefill_tokens"] for step in ours))
        preemptions += sum(len(step["preempted"]) for step in ours)
    assert steps > 10_000
    fits, too_small, far_too_small = computed[SCENARIOS:]
    assert fits < 1.1 * WORKING_SET_TOKENS < too_small < far_too_small, "the cache does not run out"
    assert preemptions > 1_000, "the scenarios are too easy to say anything"
    print(f"{SCENARIOS} scenarios, {steps} iterations, {preemptions} preemptions: the same in all")
