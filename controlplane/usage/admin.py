"""Admin of usage and prices. A price changes with its GPU type or SLO class, or with a date by `/api/prices`."""

from controlplane.fleet.models import Price
from controlplane.resources.admin import show
from controlplane.usage.models import InstanceHour, UsageHour

show(
    UsageHour,
    *("hour", "tenant", "api_key", "model", "slo_class", "requests", "prompt_tokens", "output_tokens", "gpu_s"),
    *("cost_usd", "charged_usd"),
    search=("=model",),
)
show(
    InstanceHour,
    *("hour", "instance", "model", "gpu_type", "slo_class", "work", "gpu_s", "cost_usd", "charged_usd"),
    search=("instance",),
)
show(Price, "of", "name", "amount", "from_at", "reason", "created_by", "created_at", search=("name",))
