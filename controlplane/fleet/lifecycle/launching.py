"""Launch specifications of a deployment's servers, and checks of its vLLM flags."""

import shlex
from typing import Any

from django.conf import settings

from controlplane.fleet.models import Deployment, Device, Instance, PerformanceProfile, Tier
from controlplane.fleet.models.instances import OF_VLLM
from controlplane.fleet.swaps.times import usual_load_s, usual_sleep_s
from controlplane.fleet.weights import pull_s
from scheduling.fleet.adapter_memory import FROM_MEMORY_S, FROM_STORAGE_S
from scheduling.model_task import Task
from workers.vllm.launcher import CHECKED, LaunchError
from workers.vllm.serve import problem_with
from workers.vllm.spec import LaunchSpec

EMULATED_STARTUP_S = 2.0  # short on purpose: enough to see an instance load
LONGEST_STARTUP_S = 3600.0  # that an emulated server takes
BLOCK_SIZE_TOKENS = 16  # vLLM's default on GPUs


def launch_spec(instance: Instance, profile: PerformanceProfile | None = None) -> LaunchSpec:
    """Return the launch specification of *instance*, with *profile* if it is emulated.

    Raises LaunchError when an emulated instance has no profile or its KV cache would be empty.
    """
    deployment: Deployment = instance.deployment
    if instance.launcher in OF_VLLM:
        return process_spec(deployment, instance)
    row = profile or deployment.profile()
    if row is None:
        raise LaunchError(
            f"there is no performance profile for {deployment}, tensor parallel {deployment.tensor_parallel}"
        )
    kv_blocks = deployment.expected_kv_tokens // BLOCK_SIZE_TOKENS
    if kv_blocks < 1:
        raise LaunchError(f"the weights of {deployment.model} leave no room for a KV cache on {deployment.gpu_type}")
    offloaded, restore_s, restore_s_per_token = deployment.offload_of(deployment.kv_offload_gib)
    return LaunchSpec(
        **_common(deployment, instance),
        profile=row.coefficients(),
        front_end=row.front_end(),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        kv_blocks=kv_blocks,
        enable_prefix_caching=deployment.emulated_with_prefix_cache,
        offload_blocks=offloaded // BLOCK_SIZE_TOKENS,
        restore_s=restore_s,
        restore_s_per_token=restore_s_per_token,
        startup_s=min(EMULATED_STARTUP_S + pull_s(deployment.model, deployment.region), LONGEST_STARTUP_S),
        sleep_s=usual_sleep_s(deployment, Tier.CPU),
        wake_s=usual_load_s(deployment, Tier.CPU),
        reload_s=usual_load_s(deployment, Tier.STORAGE),
        adapter_storage_s=FROM_STORAGE_S,
        adapter_memory_s=FROM_MEMORY_S,
    )


def start_spec(instance: Instance) -> LaunchSpec:
    """Return the launch specification of *instance* for its start now: with what is known of the GPUs of its node."""
    known = list(instance.node.gpus.all()) if instance.node else []
    gpus = {
        "cordoned_gpus": tuple(gpu.name for gpu in known if gpu.cordoned),
        "suspect_gpus": tuple(gpu.name for gpu in known if gpu.failed_starts),
    }
    return launch_spec(instance).model_copy(update=gpus)


def _common(deployment: Deployment, instance: Instance | None) -> dict[str, Any]:
    publishes = deployment.policy().follow_kv_events
    return {
        "name": instance.name if instance else "any",
        "model": deployment.model.name,
        "task": Task(deployment.model.task),
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "max_model_len": deployment.model.context_tokens,
        "tensor_parallel": deployment.tensor_parallel,
        "scheduling_policy": deployment.scheduling_policy,
        "max_loras": deployment.max_loras,
        "max_cpu_loras": deployment.max_cpu_loras,
        "kv_offload_gib": deployment.kv_offload_gib,
        "enable_kv_cache_events": publishes,
        "enable_prompt_tokens_details": publishes,
    }


def process_spec(deployment: Deployment, instance: Instance | None = None) -> LaunchSpec:
    """Return the command of the vLLM process of *instance*."""
    node = instance.node if instance else None
    on_cpu = deployment.gpu_type.device == Device.CPU
    shares = instance is not None and instance.swap_group_id is not None
    return LaunchSpec(
        **_common(deployment, instance),
        max_lora_rank=deployment.lora_rank,
        source=deployment.model.source,
        node=node.name if node else "",
        host=node.address if node else "127.0.0.1",
        gpus=node.gpu_count if node and not on_cpu else 0,
        shares_gpus_with=_sharing(instance) if instance else (),
        sleep_mode=shares and not on_cpu,  # vLLM refuses it on CPUs
        gpu_memory_utilization=deployment.gpu_memory_utilization,
        cpu_kv_bytes=deployment.expected_kv_tokens * deployment.model.kv_bytes_per_token if on_cpu else None,
        extra_args=tuple(shlex.split(deployment.vllm_args)),
        environment={**deployment.environment, **deployment.secrets},
        api_key=deployment.api_key,
    )


def _sharing(instance: Instance) -> tuple[str, ...]:
    """Return the names of other instances of its swap group."""
    if instance.swap_group_id is None:
        return ()
    others = Instance.objects.filter(swap_group=instance.swap_group_id).exclude(pk=instance.pk)
    return tuple(others.order_by("pk").values_list("name", flat=True))


def arguments_problem(deployment: Deployment) -> str:
    """Return the error of vLLM's parser for the extra flags of *deployment*; "" for none or without vLLM."""
    if not settings.VLLM_PYTHON or not deployment.vllm_args:
        return ""
    cache = settings.STATE_DIR / "instances" / CHECKED
    return problem_with(settings.VLLM_PYTHON, process_spec(deployment), cache) or ""
