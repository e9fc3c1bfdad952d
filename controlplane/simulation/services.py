"""Writes of fitted performance profiles."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from django.db import transaction

from controlplane.events.services import record
from controlplane.fleet.models import GpuType, Model, PerformanceProfile
from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_fitting import Fit


@transaction.atomic
def store_profiles(fits: Iterable[Fit], source: str, actor: str) -> list[PerformanceProfile]:
    """Store a profile for every fit whose model and GPU type are in the inventory, replacing existing ones.

    Of several fits for one setting (engines, precisions) the one with the smallest held-out error is stored; unknown
    errors count as the largest. Each change is an event with the coefficients before and after.
    """
    models, gpu_types = list(Model.objects.all()), list(GpuType.objects.all())
    best: dict[tuple[int, int, int], tuple[Model, GpuType, Fit]] = {}
    for fit in fits:
        model, gpu_type = find_model(fit.setting.model, models), find_gpu_type(fit.setting.gpu_type, gpu_types)
        if model is None or gpu_type is None:
            continue
        key = model.pk, gpu_type.pk, fit.setting.tensor_parallel
        if key not in best or _badness(fit) < _badness(best[key][2]):
            best[key] = model, gpu_type, fit
    return [_store(model, gpu_type, fit, source, actor) for model, gpu_type, fit in best.values()]


def _store(model: Model, gpu_type: GpuType, fit: Fit, source: str, actor: str) -> PerformanceProfile:
    Model.objects.select_for_update(no_key=True).get(pk=model.pk)  # of two who write its first profile, one waits
    row = PerformanceProfile.objects.filter(
        model=model, gpu_type=gpu_type, tensor_parallel=fit.setting.tensor_parallel
    ).first()
    names = [field.name for field in fields(Profile)]
    before = {name: getattr(row, name) for name in [*names, "source"]} if row else None
    row = row or PerformanceProfile(model=model, gpu_type=gpu_type, tensor_parallel=fit.setting.tensor_parallel)
    for name in names:
        setattr(row, name, getattr(fit.profile, name))
    row.source, row.estimated = f"{source} {fit.setting.variant}".strip()[:255], False
    row.prefill_error_pct = fit.prefill_error.held_out_pct if fit.prefill_error else None
    row.decode_error_pct = fit.decode_error.held_out_pct if fit.decode_error else None
    row.full_clean()
    row.save()
    after = {name: getattr(row, name) for name in [*names, "source"]}
    record("profile.fitted", row, actor=actor, before=before, after=after)
    return row


def _badness(fit: Fit) -> float:
    errors = [error.held_out_pct for error in (fit.prefill_error, fit.decode_error) if error]
    return sum(error for error in errors if error is not None) if errors and None not in errors else float("inf")


def find_model(name: str, models: Sequence[Model]) -> Model | None:
    """Return the model that a publication calls *name*: `meta-llama/Llama-3.1-8B-Instruct` is our `llama-3.1-8b`."""
    return next((model for model in models if _plain(model.name) == _plain(name)), None)


def find_gpu_type(name: str, gpu_types: Sequence[GpuType]) -> GpuType | None:
    """Return the GPU type that a publication calls *name*: `h100_sxm` and `H100` are `h100-80gb`, `A100-80` is
    `a100-80gb`.

    None if ambiguous, or if it ran with a power cap.
    """
    wanted = _words(name)
    if "pcap" in wanted:
        return None
    sizes = {word for word in wanted if re.fullmatch(r"\d+(gb)?", word)}
    matches = [
        gpu_type
        for gpu_type in gpu_types
        if _words(gpu_type.name)[0] == wanted[0]
        and all(
            size.removesuffix("gb") in {word.removesuffix("gb") for word in _words(gpu_type.name)} for size in sizes
        )
    ]
    return matches[0] if len(matches) == 1 else None


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower()) or [""]


def _plain(name: str) -> str:
    """Return *name* without owner, tuning, precision and punctuation."""
    words = _words(name.rpartition("/")[2].replace(".", ""))
    return "".join(word for word in words if word not in {"instruct", "chat", "hf", "fp8", "fp4", "nvfp4", "bf16"})
