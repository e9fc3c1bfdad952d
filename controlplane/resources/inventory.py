"""Rows of the inventory: regions and their latencies, GPU types, nodes, models, SLO classes, deployments."""

from datetime import datetime
from functools import partial
from typing import Annotated, Any

from django.utils import timezone
from pydantic import AfterValidator, BaseModel, Field

from controlplane.accounts.models import Role, User
from controlplane.fleet import maintenance, selectors, services, stock
from controlplane.fleet.inventory import kinds
from controlplane.fleet.models import (
    Deployment,
    Gpu,
    Maintenance,
    MaintenanceState,
    Model,
    Node,
    Price,
    PriceOf,
    Region,
    Stock,
    StockState,
)  # fmt: skip
from controlplane.fleet.rollouts import services as rollouts
from controlplane.gateway import targets
from controlplane.resources.filters import Search
from controlplane.resources.resource import Column, Filter, Operation, Resource, of_choice, of_region, search_in
from controlplane.rows import Instant, within
from scheduling.policy import COLUMNS as POLICY

CORDONED = "console/fleet/cordoned_cell.html"
CORDONS = (
    Operation(
        "cordon", services.cordon, "Nothing new is started there; what runs stays: drain it to move its requests."
    ),
    Operation("uncordon", services.uncordon, "Instances may be started there again."),
)


def in_zone(at: datetime) -> datetime:
    return within(timezone.make_aware(at) if timezone.is_naive(at) else at)


Local = Annotated[datetime, AfterValidator(in_zone)]
"""Without an offset it is of the console's zone."""


class MaintenanceIn(BaseModel):
    until: Local = Field(description="When it ends by itself.")
    from_at: Local | None = Field(None, description="When it begins; by default now.")


def maintain(place: Node | Region, user: User, reason: str, **window: Any) -> str:
    return maintenance.planned(maintenance.plan(place, user, reason, **window))


PLACES = (
    *CORDONS,
    Operation(
        "maintenance",
        maintain,
        "Until its end nothing is started there; instances there finish what they run, stop, and start again at its end.",
        takes=MaintenanceIn,
        form=True,
    ),
)
"""What is done with nodes and regions."""


class RolloutIn(BaseModel):
    bake_s: int = Field(60, ge=0, le=86_400, description="Seconds that each new instance is judged; 0: not.")
    failure_budget: float = Field(
        0.05, ge=0, le=1, description="Share of failed requests by which new instances may exceed the others."
    )
    min_requests: int = Field(
        20, ge=1, le=1_000_000, description="By which they are judged; with fewer in its time, an instance is probed."
    )
    auto_back: bool = Field(True, description="Go back when the new instances are bad; else the rollout fails.")


def roll_out(deployment: Deployment, user: User, reason: str, **values: Any) -> str:
    rollouts.start(deployment, user, reason, **values)
    return f"The rollout of {deployment} begins within seconds."


def columns(*names: str) -> tuple[Column, ...]:
    """Columns that only REST has, as the model's fields describe them."""
    return tuple(Column(name) for name in names)


def shown(name: str, heading: str, source: str = "", **more: Any) -> Column:
    """A column of the page and the file alone."""
    return Column(name, heading, source, rest=False, **more)


def by_name(rows: Any, text: str) -> list[Any]:
    return [row for row in rows if text.lower() in row.name.lower()]


def _gpus_in(state: str, node: Node) -> int:
    return selectors.gpus_of(node)[state]


REGIONS = Resource(
    name="regions",
    noun="region",
    model=Region,
    kind=kinds.REGION,
    operations=PLACES,
    rows=lambda viewer: Region.objects.all(),
    columns=(
        *columns("name", "title", "zone", "active", "cordoned", "dark_since"),
        Column("latency_ms", type=dict[str, float]),
    ),
)
PRICES = Resource(
    name="prices",
    noun="price",
    model=Price,
    rows=lambda viewer: Price.objects.all(),
    columns=(
        Column("id"),
        Column("of", type=PriceOf),
        Column("item", "Of", lambda row: PriceOf(row.of).label, rest=False),
        Column("name", "Name"),
        Column("amount", "Amount (USD an hour, or a factor)", label="Amount"),
        Column("from_at", "From (UTC)", draw="moment"),
        Column("reason", "Reason"),
        Column("created_by", "By"),
        Column("created_at", "Entered (UTC)", draw="moment"),
    ),
    least=Role.VIEWER,
    filters=(of_choice("of", PriceOf, "items"), Filter("name")),
    page=("item", "name", "amount", "from_at", "reason", "created_by", "created_at"),
    empty="No price was entered.",
)
NODES = Resource(
    name="nodes",
    noun="node",
    model=Node,
    kind=kinds.NODE,
    operations=PLACES,
    rows=lambda viewer: selectors.nodes(),
    least=Role.VIEWER,
    columns=(
        Column("name"),
        Column("region", source="region.name", type=str),
        Column("gpu_type", source="gpu_type.name", type=str),
        *columns("gpu_count", "address", "active", "cordoned"),
        *(Column(f"gpus_{state}", source=partial(_gpus_in, state), type=int) for state in ("used", "cordoned", "free")),
        *columns("host", "reported_at"),
        Column("ray", type=dict[str, Any]),
    ),
    filters=(
        search_in("name", "address", control=Search("q", "Search by name or address")),
        of_region("region__name"),
    ),
)
MAINTENANCE = Resource(
    name="maintenance",
    noun="maintenance window",
    model=Maintenance,
    operations=(
        Operation(
            "end",
            maintenance.end,
            "Its place is uncordoned, and what it stopped starts again; one to come is cancelled.",
        ),
    ),
    rows=lambda viewer: Maintenance.objects.select_related("node", "region"),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("node", source="node.name", type=str | None),
        Column("region", source="region.name", type=str | None),
        *(Column(name) for name in ("from_at", "until", "begun_at", "ended_at", "reason", "created_by")),
        Column("state", type=MaintenanceState),
    ),
    filters=(
        Filter("node", "node__name"),
        Filter("region", "region__name"),
        Filter("since", lambda rows, at: rows.ending_after(at), Instant, about="Windows that end after it."),
        Filter("until", "from_at__lt", Instant, about="Windows that begin before it."),
    ),
)
GPUS = Resource(
    name="gpus",
    noun="GPU",
    title="GPUs",
    model=Gpu,
    operations=CORDONS,
    rows=lambda viewer: Gpu.objects.select_related("node__region"),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("gpu", "GPU", str, rest=False),
        Column("node", "Node", "node.name", type=str),
        Column("name", label="GPU"),
        Column("address", "Address on the bus"),
        Column("failed_starts", type=dict[str, str]),
        Column("failures", "Failed on it", lambda row: "; ".join(row.failed_starts.values()), rest=False, draw="wide"),
        Column("cordoned", "Cordoned by", draw=CORDONED, kind="wrap"),
    ),
    filters=(Filter("node", "node__name"),),
    page=("gpu", "failures", "cordoned"),
    whole=500,
)
STOCK = Resource(
    name="stock",
    noun="row",
    model=Stock,
    operations=(Operation("pull", stock.pull, "Its node copies the weights from the hub onto its disk."),),
    rows=lambda viewer: Stock.objects.select_related("node"),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("name", "Model or adapter", draw="id"),
        Column("node", source="node.name", type=str),
        Column("source", "Source"),
        Column("state", "State", type=StockState, draw="mark"),
        Column("bytes", "On disk", draw="console/fleet/bytes_cell.html", kind="num"),
        Column("changed_at", "Changed (UTC)", draw="moment"),
        Column("error", "Error", draw="wide"),
    ),
    filters=(
        search_in("name", "source", control=Search("q", "Search by name or source")),
        Filter("node", "node__name"),
        Filter("state", type=StockState),
    ),
    page=("name", "source", "state", "bytes", "changed_at", "error"),
    actions="console/fleet/stock_actions.html",
)
MODELS = Resource(
    name="models",
    noun="model",
    model=Model,
    kind=kinds.MODEL,
    operations=(
        Operation(
            "retire", services.retire, "Undeployed everywhere and offered no more; its history stays.", Role.ADMIN
        ),
    ),
    rows=lambda viewer: Model.objects.select_related("fallback").prefetch_related("weights_in"),
    least=Role.VIEWER,
    columns=(
        Column("name", "Model", sorts=True),
        *columns("title", "source", "weights_bytes", "kv_bytes_per_token", "context_tokens", "architecture"),
        *columns("task", "active"),
        Column("fallback", source="fallback.name", type=str | None),
        Column("fallback_wait_s"),
        Column("weights_in", source=lambda row: sorted(region.name for region in row.weights_in.all()), type=list[str]),
        shown("hardware", "Hardware of an instance"),
        shown("endpoints", "", label="Ready by region"),
        shown("ready", "Ready (instances)", "sums.ready", label="Ready of limit", draw="count", sorts=True),
        shown("most", "Limit (instances)"),
        shown("demand", "Demand, last 10 min (tok/s)", "sums.demand_tokens_per_s", sorts=True),
        shown("capacity", "Capacity (tok/s)", "sums.capacity_tokens_per_s"),
        shown(
            *("load", "Load (ratio)", "sums.load"),
            draw="percent",
            sorts=True,
            tip="Demand of the last 10 minutes over the capacity of ready instances",
        ),
        shown(
            *("forecast_load", "Forecast load (ratio)"),
            draw="percent",
            sorts=True,
            tip="The forecast's peak over the capacity that there is now",
        ),
        shown("output_tokens_per_s", "Output (tok/s)", "live.output_tokens_per_s"),
        shown("slo_class", "SLO class, the worst", "live.slo_class"),
        shown("slo_met", "SLO met, 5 min (ratio)", "live.slo_met_ratio", draw="percent", sorts=True),
        shown("slo_objective_ratio", "SLO promised (ratio)", "live.slo_objective_ratio"),
        shown("slo_burn", "Error budget burn, 5 min (times)", "live.slo_burn"),
        shown("ttft_p95_ms", "TTFT p95 (ms)", "live.ttft_p95_ms", draw="milliseconds", sorts=True),
        shown("usd_per_hour", "Cost (USD/h)", "sums.usd_per_hour", label="$/h", draw="usd", sorts=True),
        shown("policy", "Policy", "present.title", sorts=True),
        shown("about", "Policy means"),
    ),
    filters=(Filter("q", by_name, rest=False, shown=True, control=Search("q", "Search by name")),),
    page=(
        *("name", "endpoints", "ready", "load", "forecast_load", "slo_met", "ttft_p95_ms", "usd_per_hour", "policy"),
    ),
    caption="by name",
    template="console/models/models.html",
    row_template="console/models/row.html",
    live="instances,events",
    refresh_s=10,
    whole=500,
)
TARGET_COMPARISONS = Resource(
    name="target-comparisons",
    noun="weighted target",
    title="Weighted targets",
    model=None,
    rows=lambda viewer: targets.comparisons(timezone.now()),
    least=Role.VIEWER,
    columns=(
        Column("name", "Public name", type=str, draw="id", sorts=True),
        Column("target", "Target", type=str, draw="id"),
        Column("weight", "Weight", type=float, draw="quantity"),
        Column("share", "Share", type=float, draw="percent", about="Of the requests, by weight."),
        Column("requests", "Requests, last day", type=int, draw="count"),
        *(
            Column(
                name,
                f"{title} ({unit})",
                f"medians.{name}",
                type=float | None,
                label=title,
                draw="count" if unit == "tokens" else "milliseconds",
                about="Median of the last day.",
            )
            for name, title, unit in (
                ("ttft_ms", "TTFT", "ms"),
                ("itl_ms", "ITL", "ms"),
                ("e2e_ms", "E2E", "ms"),
                ("output_tokens", "Output", "tokens"),
            )
        ),
        Column(
            "error_ratio",
            "Errors (ratio)",
            type=float | None,
            label="Errors",
            draw="percent_fine",
            about="Share not answered, or answered by a fallback.",
        ),
        Column("heaviest", "Heaviest", type=bool, about="Whether it has the largest weight of its name."),
    ),
    page=(
        *(
            "name",
            "target",
            "share",
            "requests",
            "ttft_ms",
            "itl_ms",
            "e2e_ms",
            "output_tokens",
            "error_ratio",
        ),
    ),
)
DEPLOYMENTS = Resource(
    name="deployments",
    noun="deployment",
    model=Deployment,
    kind=kinds.DEPLOYMENT,
    operations=(
        Operation(
            "undeploy", services.undeploy, "Its instances stop and what they run is cut; its history stays.", Role.ADMIN
        ),
        Operation(
            "roll-out",
            roll_out,
            "Its instances restart with the current settings, one by one; each finishes what it runs first. "
            "`GET /api/deployments/{pk}/rollout` follows it.",
            takes=RolloutIn,
            form=True,
        ),
        Operation(
            "cancel-rollout",
            lambda row, user, reason: f"{rollouts.cancel(row, user, reason)} is cancelled.",
            "Instances that drain for its rollout serve again.",
            needs_reason=False,
        ),
        Operation(
            "roll-back",
            lambda row, user, reason: f"{rollouts.go_back(row, user, reason)} goes back.",
            "Its rollout in progress, or the last one if it failed, goes back to the settings before.",
        ),
    ),
    rows=lambda viewer: selectors.deployments(),
    columns=(
        *columns("id", "model", "region", "gpu_type", "tensor_parallel", "min_instances", "max_instances"),
        *columns("max_num_seqs", "max_num_batched_tokens", "max_loras", "max_cpu_loras", "gpu_memory_utilization"),
        *columns("kv_offload_gib"),
        *columns(*POLICY, "vllm_args", "active"),
        Column("instances_total", type=int, about="Instances that are not stopped."),
        Column("instances_ready", type=int),
        Column("expected_kv_tokens", type=int),
        Column("environment", type=dict[str, str]),
        Column(
            "secret_names",
            source=lambda row: sorted(row.secrets),
            type=list[str],
            about="Environment variables whose values are hidden.",
        ),
        Column("has_api_key", source=lambda row: bool(row.api_key), type=bool),
    ),
    filters=(Filter("model", "model__name"), Filter("region", "region__name")),
)
