"""Admin of the request ledger and the minutes counted from it."""

from controlplane.gateway.models import SUMS, LedgerRow, MinuteRow
from controlplane.resources.admin import show
from controlplane.resources.requests import REQUESTS

show(LedgerRow, *REQUESTS.stored("arrived_at", *REQUESTS.page), search=("=request_id", "=instance", "=run", "=model"))
show(
    MinuteRow,
    *("minute", "model", "region", "own_region", "slo_class", *SUMS[:6], "unserved"),
    search=("=model", "=region"),
)
