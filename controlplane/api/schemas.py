"""What `/api` takes and gives. Units stand in names; times are ISO 8601 in UTC; prices are US dollars."""

from datetime import datetime
from decimal import Decimal
from typing import Any, Generic, TypeVar
from uuid import UUID

from ninja import Field, Schema
from pydantic import ConfigDict

from controlplane.accounts.models import Role
from controlplane.events.models import Severity
from controlplane.fleet import selectors
from controlplane.fleet.lifecycle.states import Action, InstanceState
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Device,
    Launcher,
    OrderingPolicy,
    RoutingPolicy,
    SloKind,
)
from controlplane.fleet.rollouts import revisions
from controlplane.gateway.models import Outcome
from controlplane.planning.models import MoveSource, PlanStatus, PolicyMode, Quantity

Row = TypeVar("Row")


class Described(Schema):
    """Lines of text under a field are its description in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Items(Schema, Generic[Row]):
    items: list[Row]


class Page(Schema, Generic[Row]):
    """Newest first. Pass `next_cursor` back as `cursor` for the next page; null on the last."""

    items: list[Row]
    next_cursor: int | None


class Strict(Described):
    """A body in which an unknown field is an error, so that a typing mistake does not pass silently."""

    model_config = ConfigDict(extra="forbid")


class RegionOut(Described):
    name: str
    title: str
    active: bool


class GpuTypeOut(Described):
    name: str
    title: str
    device: Device
    memory_bytes: int
    on_demand_usd_per_hour: Decimal
    spot_usd_per_hour: Decimal | None
    price_source: str


class NodeOut(Described):
    name: str
    region: str = Field(alias="region.name")
    gpu_type: str = Field(alias="gpu_type.name")
    gpu_count: int
    gpus_used: int
    address: str
    active: bool


class ModelOut(Described):
    name: str
    title: str
    source: str
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    active: bool


class DeploymentOut(Described):
    id: int
    model: str = Field(alias="model.name")
    region: str = Field(alias="region.name")
    gpu_type: str = Field(alias="gpu_type.name")
    tensor_parallel: int
    min_instances: int
    max_instances: int
    instances_total: int
    """Instances that are not stopped."""
    instances_ready: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    expected_kv_tokens: int
    routing_policy: RoutingPolicy
    ordering_policy: OrderingPolicy
    ordering_stretch: float
    requests_ahead_limit: int | None
    """Requests that an instance is given beyond what it runs; null: as many as is measured."""
    queue_bound: int
    vllm_args: str
    environment: dict[str, str]
    secret_names: list[str]
    """Environment variables whose values are not shown."""
    has_api_key: bool
    active: bool

    @staticmethod
    def resolve_secret_names(row: Any) -> list[str]:
        return sorted(row.secrets)

    @staticmethod
    def resolve_has_api_key(row: Any) -> bool:
        return bool(row.api_key)


class InstanceOut(Described):
    name: str
    model: str = Field(alias="deployment.model.name")
    region: str = Field(alias="deployment.region.name")
    gpu_type: str = Field(alias="deployment.gpu_type.name")
    tensor_parallel: int = Field(alias="deployment.tensor_parallel")
    node: str | None
    launcher: Launcher
    url: str
    state: InstanceState
    state_reason: str
    state_changed_at: datetime
    startup: str
    """How far its start has come, by the server's log; empty when it is ready."""
    kv_capacity_tokens: int
    host: str
    """Whose worker started the server as a process; commands belong to it until it is stopped."""
    failures: int
    """Failures in a row; restarts wait longer with each."""
    outdated: list[str] = Field(default_factory=list)
    """Engine settings of its deployment that are other than those it was started with."""
    created_at: datetime

    @staticmethod
    def resolve_outdated(row: Any) -> list[str]:
        return list(row.outdated if hasattr(row, "outdated") else revisions.outdated([row]).get(row.pk, ()))

    @staticmethod
    def resolve_node(row: Any) -> str | None:
        return row.node.name if row.node else None


class CommandOut(Described):
    id: int
    verb: CommandVerb
    state: CommandState
    actor: str
    reason: str
    error: str
    created_at: datetime
    finished_at: datetime | None


class InstanceDetail(InstanceOut):
    possible_actions: list[Action]
    """What may be asked of it in its present state."""
    commands: list[CommandOut]
    """The newest ten."""
    engine: dict[str, Any]
    """What its server is, as measured: version, arguments, KV cache in tokens and blocks, memory in bytes."""

    @staticmethod
    def resolve_possible_actions(row: Any) -> list[Action]:
        return selectors.possible_actions(row)

    @staticmethod
    def resolve_commands(row: Any) -> list[Any]:
        return selectors.recent_commands(row)


class ActionIn(Strict):
    reason: str = Field(min_length=1, max_length=255)


class ActionOut(Described):
    message: str
    """What happened, in one sentence."""
    instance: InstanceOut


class SloClassOut(Described):
    name: str
    title: str
    kind: SloKind
    service_tier: str
    ttft_target_ms: int | None
    itl_target_ms: int | None
    e2e_target_ms: int | None
    percentile: float
    deadline_s: int | None
    weight: float
    price_factor: Decimal
    priority: int


class TenantOut(Described):
    name: str
    title: str
    operates_fleet: bool
    slo_classes: list[str]
    default_slo_class: str = Field(alias="default_slo_class.name")
    max_concurrent_requests: int
    tokens_per_minute: int
    """0 is no limit."""
    active: bool
    created_at: datetime

    @staticmethod
    def resolve_slo_classes(row: Any) -> list[str]:
        return [slo_class.name for slo_class in row.slo_classes.all()]


class KeyOut(Described):
    id: int
    tenant: str = Field(alias="tenant.name")
    name: str
    prefix: str
    usable: bool
    created_by: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    @staticmethod
    def resolve_created_by(row: Any) -> str | None:
        return row.created_by.get_username() if row.created_by else None


class KeyIn(Strict):
    tenant: str
    name: str = Field(min_length=1, max_length=80)
    expires_at: datetime | None = None


class NewKey(KeyOut):
    secret: str
    """Shown in this answer and never again."""


class RevokeIn(Strict):
    reason: str = Field(min_length=1, max_length=255)


class EventOut(Described):
    id: int
    at: datetime
    kind: str
    severity: Severity
    actor: str
    subject_type: str
    subject_id: str
    subject: str
    before: dict[str, Any]
    after: dict[str, Any]
    reason: str
    inputs: dict[str, Any]


class UsageRow(Described):
    """Demand of one minute of arrival for one model, region and SLO class."""

    minute: datetime
    model: str
    region: str
    slo_class: str
    requests: int
    failed: int
    slo_met: int
    slo_judged: int
    prompt_tokens: int
    output_tokens: int


class UsageOut(Described):
    items: list[UsageRow]
    truncated: bool
    """There are more rows than `limit`: ask for a shorter range, or for CSV."""


class RequestOut(Described):
    """One request of the ledger. Never a prompt, never a completion."""

    id: int
    request_id: str
    arrived_at: datetime
    tenant: str = Field(alias="tenant.name")
    model: str
    slo_class: str
    region: str
    application: str
    run: str
    unit: str
    streamed: bool
    outcome: Outcome
    status_code: int
    error_code: str
    error_message: str
    """What the caller was told, without quotations of the request."""
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None
    slo_met: bool | None
    instance: str | None
    """For the fleet's people alone, like `attempts` and `trace`."""
    attempts: int | None
    trace: list[Any] | None


class ForecastOut(Described):
    """What one forecaster expects of one series. Lists have one element a window, in tokens a second."""

    id: int
    made_at: datetime
    model: str
    region: str
    slo_class: str
    """Empty: all classes together."""
    quantity: Quantity
    forecaster: str
    window_s: int
    start_at: datetime
    """Begin of the first window."""
    mean: list[float | None]
    lower_80: list[float | None]
    upper_80: list[float | None]
    lower_95: list[float | None]
    upper_95: list[float | None]
    note: str
    """Why a simpler forecaster stood in, if one did."""


class BacktestOut(Described):
    id: int
    made_at: datetime
    source: str
    window_s: int
    horizon_windows: int
    rows: list[dict[str, Any]]
    """One a forecaster, series and quantity."""


class PolicyOut(Described):
    model: str
    strategy: str | None
    """Null where the model has no policy: it is scaled by the reactive floor alone."""
    mode: PolicyMode
    parameters: dict[str, Any]
    changed_at: datetime | None


class PolicyIn(Strict):
    strategy: str = Field(max_length=40)
    mode: PolicyMode
    parameters: dict[str, Any] = {}
    """Of the strategy, by name; what is not given has its standard value."""
    reason: str = Field("", max_length=255)


class PlanOut(Described):
    id: int
    round: UUID
    """Models that were planned together have the same."""
    made_at: datetime
    valid_until: datetime
    model: str = Field(alias="model.name")
    strategy: str
    status: PlanStatus
    targets: list[dict[str, Any]]
    """By region and GPU type: present and planned instances, demand, what an instance serves, and why."""
    binding: list[str]
    cost_usd_per_hour_before: float
    cost_usd_per_hour_after: float
    solver: str
    gap: float | None
    solve_ms: float | None
    note: str
    decided_by: str
    decided_at: datetime | None
    carried_out_at: datetime | None


class PlanDetail(PlanOut):
    inputs: dict[str, Any]
    """Demand, capability, prices and bounds that it was made from."""


class DecisionIn(Strict):
    reason: str = Field("", max_length=255)


class MoveOut(Described):
    """One instance added or taken away by scaling, and why."""

    id: int
    at: datetime
    plan: int | None = Field(alias="plan_id")
    source: MoveSource
    strategy: str
    model: str
    region: str
    gpu_type: str
    instance: str
    delta: int
    """1: one more; -1: one less."""
    reason: str
    inputs: dict[str, Any]


class ComparisonOut(Described):
    """The last hours of the ledger simulated under each strategy."""

    id: int
    made_at: datetime
    from_at: datetime
    to_at: datetime
    requests: int
    rows: list[dict[str, Any]]
    """One a strategy: instance-hours, dollars, p95 latencies, share of promises kept, wasted hours, moves."""
    note: str


class MeOut(Described):
    user: str | None
    tenant: str | None
    """Of the API key."""
    fleet_role: Role | None
    tenants: list[str]
