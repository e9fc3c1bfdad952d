"""Sizes of a model from the `config.json` of its source."""

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controlplane.fleet.models import Model
from workers.vllm.model_shape import ShapeError, read

SIZES = ("weights_bytes", "kv_bytes_per_token", "context_tokens")


def completed(row: Model, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return *values* for *row*, with missing or null sizes read from its source, and the task of a new model too.

    Raises ValidationError naming a size when there is no source, and the source when it does not have the sizes.
    """
    complete = dict(values)
    if not row.pk and not complete.get("title"):
        complete["title"] = complete.get("name", "")
    missing = [
        name for name in SIZES if complete.get(name) is None and (name in complete or getattr(row, name) is None)
    ]
    if not missing:
        return complete
    source = complete.get("source") or row.source
    if not source:
        raise ValidationError({missing[0]: "Give it, or a source whose config.json has it."})
    try:
        shape = read(source, context_tokens=complete.get("context_tokens"))
    except ShapeError as error:
        raise ValidationError({"source": str(error)}) from error
    if not row.pk:
        complete.setdefault("task", shape.task.value)
    return complete | {name: getattr(shape, name) for name in missing}
