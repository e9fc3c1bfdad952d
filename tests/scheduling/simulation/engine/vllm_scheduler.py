"""Run vLLM's own scheduler on scenarios, without a model. Started by vLLM's Python; JSON in, JSON out.

Input: a list of {"config": {...EngineConfig's settings...}, "requests": [{"request_id", "prompt_tokens", "output_tokens",
"priority", "arrival_s", "prefix_hashes", "before_step"}, ...]}. Output: for each scenario its steps, in the words of
`StepResult`. Steps in which vLLM schedules nothing are joined to the next one.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def make_scheduler(settings: dict, model: ModelConfig) -> Scheduler:
    cache = CacheConfig(block_size=settings["block_size_tokens"], enable_prefix_caching=settings["prefix_caching"])
    blocks = settings["kv_blocks"] + 1  # vLLM never gives out the first
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=settings["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            policy=settings["policy"],
            async_scheduling=False,
        ),
    )
    cache.block_size = settings["block_size_tokens"]
    spec = FullAttentionSpec(block_size=settings["block_size_tokens"], num_kv_heads=1, head_size=8, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings["block_size_tokens"],
        log_stats=False,
    )


def make_request(number: int, asked: dict, block_size_tokens: int) -> Request:
    """A request whose leading blocks are those its hashes stand for, and whose other tokens are unique."""
    tokens: list[int] = []
    for family, index in asked["prefix_hashes"]:
        tokens += [10_000 + 1000 * family + index] * block_size_tokens
    tokens += [100_000 + number] * (asked["prompt_tokens"] - len(tokens))
    return Request(
        request_id=asked["request_id"],
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=asked["output_tokens"], ignore_eos=True),
        pooling_params=None,
        arrival_time=asked["arrival_s"],
        priority=asked["priority"],
        block_hasher=get_request_block_hasher(block_size_tokens, sha256),
    )


def run(scenario: dict, model: ModelConfig) -> list[dict]:
    settings = scenario["config"]
    scheduler = make_scheduler(settings, model)
    to_come = list(enumerate(scenario["requests"]))
    steps: list[dict] = []
    preempted: list[str] = []
    while to_come or scheduler.has_unfinished_requests():
        while to_come and (to_come[0][1]["before_step"] <= len(steps) or not scheduler.has_unfinished_requests()):
            scheduler.add_request(make_request(*to_come.pop(0), settings["block_size_tokens"]))
        before = {request.request_id: request for request in scheduler.running}
        scheduled = scheduler.schedule()
        preempted += [request_id for request_id in before if before[request_id].status.name == "PREEMPTED"]
        if not scheduled.num_scheduled_tokens:
            continue
        ids = list(scheduled.num_scheduled_tokens)
        requests = scheduler.requests
        prefill_tokens = decode_sequences = context_tokens = 0
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request = requests[request_id]
            if request.num_output_tokens and request.num_computed_tokens - tokens == request.num_tokens - 1:
                decode_sequences += 1
                context_tokens += request.num_tokens
            else:
                prefill_tokens += tokens
        emitted = [one for one in ids if requests[one].num_computed_tokens == requests[one].num_tokens]
        sampled = [[200_000 + int(one.removeprefix("r"))] if one in emitted else [] for one in ids]  # unique
        held = dict(requests)
        scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
            ),
        )
        steps.append(
            {
                "emitted": emitted,
                "finished": [one for one in emitted if held[one].is_finished()],
                "admitted": [one for one in ids if one not in before],
                "preempted": preempted,
                "prefill_tokens": prefill_tokens,
                "decode_sequences": decode_sequences,
                "context_tokens": context_tokens,
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "kv_usage": scheduler.kv_cache_manager.usage,
            }
        )
        preempted = []
    return steps


def main() -> None:
    scenarios = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever vLLM prints is not the answer
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1000, seed=0)
        init_none_hash(sha256)
        results = [run(scenario, model) for scenario in scenarios]
    with os.fdopen(answers, "w") as out:
        json.dump(results, out)


if __name__ == "__main__":
    main()
