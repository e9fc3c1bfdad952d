"""Usage as a file of FOCUS 1.0, the FinOps Open Cost and Usage Specification, which cost tools import.

A row is a day's use of one model on one GPU type by one tenant in one SLO class; idle time has no sub-account.
`EffectiveCost`, `ListCost` and `ContractedCost` are the cost of the GPUs at their on-demand price, `BilledCost` what the
tenant is charged. Moments are UTC; days and months begin with those of the zone.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.resources.tables import Columns
from controlplane.usage.models import Work
from controlplane.usage.selectors import UsageScope, summed, usage

GROUPED_BY = ("day", "tenant", "model", "slo_class", "work", "gpu_type")
PROVIDER = "Pilothouse"
NOTHING = "nothing ran"


def _constant(value: str | None) -> Any:
    return lambda row: value


def _dollars(name: str) -> Any:
    return lambda row: f"{row[name]:.6f}"


def _at(name: str) -> Any:
    return lambda row: row[name].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _per_hour(row: dict[str, Any]) -> str:
    """Return the mean price of a GPU hour of *row*."""
    return f"{row['cost_usd'] / row['gpu_s'] * 3600:.6f}" if row["gpu_s"] else "0.000000"


COLUMNS: Columns = {
    "AvailabilityZone": _constant(None),
    "BilledCost": _dollars("charged_usd"),
    "BillingAccountId": _constant(PROVIDER.lower()),
    "BillingAccountName": _constant(PROVIDER),
    "BillingCurrency": _constant("USD"),
    "BillingPeriodEnd": _at("month_end"),
    "BillingPeriodStart": _at("month"),
    "ChargeCategory": _constant("Usage"),
    "ChargeClass": _constant(None),
    "ChargeDescription": lambda row: (
        f"{row['model']} on {row['gpu_type'] or NOTHING}, {Work(row['work']).label.lower()}"
    ),
    "ChargeFrequency": _constant("Usage-Based"),
    "ChargePeriodEnd": _at("day_end"),
    "ChargePeriodStart": _at("day"),
    "CommitmentDiscountCategory": _constant(None),
    "CommitmentDiscountId": _constant(None),
    "CommitmentDiscountName": _constant(None),
    "CommitmentDiscountStatus": _constant(None),
    "CommitmentDiscountType": _constant(None),
    "ConsumedQuantity": lambda row: f"{row['gpu_s'] / 3600:.6f}",
    "ConsumedUnit": _constant("Hours"),
    "ContractedCost": _dollars("cost_usd"),
    "ContractedUnitPrice": _per_hour,
    "EffectiveCost": _dollars("cost_usd"),
    "InvoiceIssuerName": _constant(PROVIDER),
    "ListCost": _dollars("cost_usd"),
    "ListUnitPrice": _per_hour,
    "PricingCategory": _constant("Standard"),
    "PricingQuantity": lambda row: f"{row['gpu_s'] / 3600:.6f}",
    "PricingUnit": _constant("Hours"),
    "ProviderName": _constant(PROVIDER),
    "PublisherName": _constant(PROVIDER),
    "RegionId": _constant(None),
    "RegionName": _constant(None),
    "ResourceId": "model",
    "ResourceName": "model",
    "ResourceType": _constant("Model"),
    "ServiceCategory": _constant("AI and Machine Learning"),
    "ServiceName": _constant("Inference"),
    "SkuId": lambda row: row["gpu_type"] or NOTHING,
    "SkuPriceId": lambda row: row["gpu_type"] or NOTHING,
    "SubAccountId": "tenant_name",
    "SubAccountName": "tenant_title",
    "Tags": lambda row: json.dumps({"slo_class": row["slo_class"], "work": row["work"]}),
    "x_Requests": "requests",
    "x_PromptTokens": "prompt_tokens",
    "x_OutputTokens": "output_tokens",
}


def rows(asked: UsageScope) -> Iterator[dict[str, Any]]:
    """Return the rows of *asked* that used or cost something, by day."""
    for row in map(summed, usage(asked, GROUPED_BY)):
        if row["gpu_s"] or row["requests"] or row["cost_usd"]:
            day: datetime = row["day"]
            month = day.replace(day=1)
            ends = {"day_end": _next(day, 1), "month": month, "month_end": _next(month, 31).replace(day=1)}
            yield row | ends


def _next(day: datetime, days: int) -> datetime:
    """Return the midnight that many *days* later, on the zone's clock."""
    return (day.replace(tzinfo=None) + timedelta(days=days)).replace(tzinfo=day.tzinfo)
