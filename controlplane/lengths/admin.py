"""Admin of output lengths: versions are decided on, the rest is read. Samples are shown without their text."""

from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion
from controlplane.resources.admin import show
from controlplane.resources.lengths import LENGTH_VERSIONS

show(
    LengthVersion,
    *("number", "kind", "state", "trained_at", "samples", "note", "changed_at"),
    search=("=number", "note"),
    operations=LENGTH_VERSIONS.operations,
)
show(
    LengthSample,
    *("at", "model", "tenant", "slo_class", "prompt_tokens", "predicted_tokens", "output_tokens", "predicted_by"),
    search=("=model",),
    exclude=("text", "features"),
)
show(
    LengthMinute,
    *("minute", "model", "tenant", "predictor", "requests", "absolute_error_tokens"),
    search=("tenant", "=model"),
)
