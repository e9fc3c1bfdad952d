"""Settings that servers were started with, compared with those that their deployments have now.

A server reads its flags and variables once. What it was started with is kept with its instance
(`Instance.launched_with`), field by field as in `LaunchSpec`; variables and the token as digests.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Launcher, PerformanceProfile
from workers.vllm.launcher import LaunchError
from workers.vllm.spec import LaunchSpec

OF_ONE_INSTANCE = {"name", "node", "host", "port", "gpus", "startup_s", "sleep_s", "wake_s", "reload_s"}
OF_ONE_INSTANCE |= {"shares_gpus_with", "cordoned_gpus", "suspect_gpus", "sleep_mode"}
"""Fields that differ between instances of one deployment."""
SHOWN_AS = {"extra_args": "vllm_args", "max_model_len": "context_tokens", "cpu_kv_bytes": "kv_cache"}
SHOWN_AS |= {"kv_blocks": "kv_cache", "enable_kv_cache_events": "kv_events"}
SHOWN_AS |= dict.fromkeys(("offload_blocks", "restore_s", "restore_s_per_token"), "kv_offload_gib")
SHOWN_AS |= dict.fromkeys(("enable_prompt_tokens_details", "enable_prefix_caching"), "kv_events")  # go with these
COLUMNS = (
    *("tensor_parallel", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_loras"),
    *("max_cpu_loras", "kv_offload_gib", "vllm_args", "environment", "ordering_policy", "kv_events"),
)
"""Columns of a deployment that its servers are started with, but its secrets."""
RUNNING = frozenset(InstanceState) - {InstanceState.PROVISIONING, InstanceState.STOPPED, InstanceState.FAILED}
"""States in which there is a server."""


def settings_of(spec: LaunchSpec) -> dict[str, Any]:
    """Return the part of *spec* that all instances of the deployment share, as JSON values without secrets."""
    values = spec.model_dump(mode="json", exclude=OF_ONE_INSTANCE)
    values["environment"] = {name: _digest(value) for name, value in sorted(spec.environment.items())}
    values["api_key"] = _digest(spec.api_key)
    return values


def launched_with(deployment: Deployment, spec: LaunchSpec) -> dict[str, Any]:
    """Return what is kept with an instance of what it is started with."""
    return settings_of(spec) | {"deployment": {name: getattr(deployment, name) for name in COLUMNS}}


def restore(deployment: Deployment, before: dict[str, Any]) -> dict[str, Any]:
    """Set the columns of *deployment* that differ to what they were in *before*; return their values now. Does not save.

    Raises LaunchError, naming what differs, where that is not all: secrets, tokens and what is of the model are not kept.
    """
    kept = before.get("deployment")
    own = deployment.instances.exclude(launcher=Launcher.EXTERNAL).first()
    if kept is None or own is None:
        raise LaunchError("the settings before are not known")
    now = {name: getattr(deployment, name) for name, value in kept.items() if getattr(deployment, name) != value}
    for name in now:
        setattr(deployment, name, kept[name])
    own.deployment, own.launched_with = deployment, before
    if names := difference(own):
        raise LaunchError(f"secrets, tokens and settings of the model are not set back ({', '.join(names)})")
    return now


def difference(instance: Instance, profile: PerformanceProfile | None = None) -> tuple[str, ...] | None:
    """Return the settings that differ from those *instance* was started with; None if the latter are unknown.

    Fields of another release are ignored. Raises LaunchError if the deployment's settings cannot be started.
    """
    return _difference(instance, settings_of(launch_spec(instance, profile))) if instance.launched_with else None


def _difference(instance: Instance, now: dict[str, Any]) -> tuple[str, ...]:
    held = instance.launched_with
    return tuple(sorted({SHOWN_AS.get(name, name) for name in now if held.get(name, now[name]) != now[name]}))


def outdated(rows: Iterable[Instance]) -> dict[int, tuple[str, ...]]:
    """Return the settings that differ, by key, for those of *rows* started with other settings.

    Those of a deployment are made once for all of its instances.
    """
    rows = [row for row in rows if row.launcher != Launcher.EXTERNAL and row.state in RUNNING and row.launched_with]
    profiles: dict[tuple[int, int, int], PerformanceProfile] = {}
    if any(row.launcher == Launcher.EMULATED for row in rows):
        of_models = PerformanceProfile.objects.filter(model__in={row.deployment.model_id for row in rows})
        profiles = {(row.model_id, row.gpu_type_id, row.tensor_parallel): row for row in of_models}
    settings: dict[tuple[int, str], dict[str, Any] | None] = {}
    differ = {}
    for row in rows:
        of, key = row.deployment, (row.deployment_id, row.launcher)
        if key not in settings:
            try:
                spec = launch_spec(row, profiles.get((of.model_id, of.gpu_type_id, of.tensor_parallel)))
            except LaunchError:
                settings[key] = None
            else:
                settings[key] = settings_of(spec)
        now = settings[key]
        if now is not None and (names := _difference(row, now)):
            differ[row.pk] = names
    return differ


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:16] if secret else ""
