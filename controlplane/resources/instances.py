"""Instances, with the live numbers of their gateway on the page and in the file."""

from functools import partial
from typing import Any

from django.db.models import QuerySet

from controlplane.accounts.models import Role, User
from controlplane.fleet import services
from controlplane.fleet.inventory.kinds import INSTANCE
from controlplane.fleet.lifecycle.states import Action, InstanceState
from controlplane.fleet.models import Instance, Launcher, Tier
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.selectors import instances
from controlplane.fleet.swaps import services as swaps
from controlplane.resources.filters import Hidden, Search, Select, every
from controlplane.resources.resource import (
    LEAVES,
    LEAVES_FIRST,
    Column,
    Filter,
    Operation,
    Resource,
    Viewer,
    of_model,
    of_region,
    search_in,
)

ACTIONS = {
    Action.DRAIN: "It finishes what it runs and is given nothing new.",
    Action.RESUME: "It is given requests again.",
    Action.START: "Its server is started; it is ready when its health check passes.",
    Action.STOP: "Its server stops and running requests are cut: drain it first to spare them. Only Start brings it back.",
    Action.RESTART: "It finishes what it runs, stops, and starts again; the model may be short of it meanwhile.",
    Action.SLEEP: "It finishes what it runs, then its weights leave the GPU. Waking is faster than starting.",
    Action.WAKE: "Its weights return to the GPU; it is ready when its health check passes.",
    Action.RECLAIM: "Its opportunistic requests are queued again or ended, by class; then it serves its own model again.",
}
STATUSES = {
    "failed": "Failed",
    "unreachable": "Unreachable",
    "resting": "Resting",
    "saturated": "Saturated",
    "draining": "Draining",
    "reclaiming": "Reclaiming",
    "loading": "Loading",
    "provisioning": "Provisioning",
    "ready": "Ready",
    "donated": "Running spare work",
    "sleeping": "Sleeping",
    "held": "Stopped by operator",
    "stopped": "Stopped",
}
"""States as pages show them, worst first: those of the row, and what the gateway's last answer says against one."""


def swap(instance: Instance, actor: User, reason: str) -> str:
    made = swaps.request(instance, actor, reason)
    return f"{made.group} swaps to {instance.name}{f', when {made.gave_way} is idle' if made.gave_way else ''}."


def outdated(row: Instance) -> list[str]:
    return list(vars(with_outdated([row])[0])["outdated"])


def with_outdated(rows: list[Any]) -> list[Any]:
    """Compare all *rows* with their deployments at once, where that was not done yet."""
    missing = [row for row in rows if "outdated" not in vars(row)]
    differ = revisions.outdated(missing)
    for row in missing:
        vars(row)["outdated"] = differ.get(row.pk, ())
    return rows


def live(name: str, heading: str, draw: str, **more: Any) -> Column:
    """A number of the gateway's summary; REST has it in `/api/summary`."""
    return Column(name, heading, live=draw, rest=False, sorts=True, **more)


def visible_instances(_viewer: Viewer) -> QuerySet[Instance]:
    return instances()


INSTANCES = Resource(
    name="instances",
    noun="instance",
    title="Fleet",
    model=Instance,
    kind=INSTANCE,
    operations=(
        *(Operation(str(action), partial(services.act, action), about) for action, about in ACTIONS.items()),
        Operation(
            "swap",
            swap,
            "The awake instance of its swap group drains and sleeps, then it wakes or starts.",
            admin=False,
        ),
    ),
    rows=visible_instances,
    least=Role.VIEWER,
    columns=(
        Column("name", "Instance", draw="console/fleet/name_cell.html", sorts=True),
        Column("status", "State", draw="console/fleet/status_cell.html", rest=False, sorts=True),
        Column("model", "Model", "deployment.model.name", type=str, sorts=True),
        Column("region", "Region", "deployment.region.name", type=str, sorts=True),
        Column("region_title", label="Region", rest=False, sorts=True),
        Column("gpu_type", "GPU type", "deployment.gpu_type.name", type=str),
        Column("tensor_parallel", source="deployment.tensor_parallel", type=int),
        Column("node", "Node", "node.name", type=str | None, sorts=True),
        Column("gpus", "GPUs", type=list[str], tip="How many, and which where its node's agent has said so"),
        Column("launcher", type=Launcher),
        Column("url"),
        Column("kv_events"),
        Column("state", type=InstanceState),
        Column("state_reason"),
        Column("state_changed_at"),
        Column("tier", type=Tier, about="Where the weights are."),
        Column(
            "swap_group",
            source=lambda row: row.swap_group.name if row.swap_group else None,
            type=str | None,
            about="Instances that share its GPUs: `/api/swap-groups`.",
        ),
        Column(
            "outdated",
            source=outdated,
            type=list[str],
            about="Engine settings of the deployment that differ from those it was started with.",
        ),
        *(
            Column(name)
            for name in ("startup", "kv_capacity_tokens", "host", "failures", "held", "restart", "created_at")
        ),
        live("running", "Running (requests)", "running_of"),
        live(
            *("waiting", "Waiting there (requests)", "count"),
            leaves=LEAVES,
            tip="In the instance; what waits for one is in Queues",
        ),
        Column("max_num_seqs", "Limit (requests)", rest=False),
        Column(
            "use_ratio",
            "Use, the highest of sequences and KV cache (ratio)",
            label="Use",
            draw="console/fleet/use_cell.html",
            kind="num kv",
            rest=False,
            sorts=True,
            tip="The highest of sequences and KV cache",
        ),
        live("kv_ratio", "KV cache (ratio)", "percent", leaves=LEAVES),
        live("output_tokens_per_s", "Output (tok/s)", "quantity", label="Out tok/s", leaves=LEAVES),
        live("ttft_p95_ms", "TTFT p95 (ms)", "milliseconds", leaves=LEAVES),
        live("itl_p95_ms", "ITL p95 (ms)", "milliseconds", leaves=LEAVES_FIRST),
        live(
            "preemptions_per_min", "Preemptions (1/min)", "count", label="Preempt", tip="A minute", leaves=LEAVES_FIRST
        ),
        live("prefix_hit_ratio", "Prefix hits (ratio)", "percent", label="Prefix", leaves=LEAVES_FIRST),
        live("cached_blocks", "Cached blocks, by KV events", "count"),
        Column("cache_unknown", "Why its KV events do not say what is cached", rest=False),
        live("heartbeat_at", "Last heartbeat (UTC)", "age", label="Heartbeat", leaves=LEAVES_FIRST),
        Column(
            "state_since",
            "In this state since (UTC)",
            label="In state",
            draw="since",
            rest=False,
            sorts=True,
            leaves=LEAVES,
        ),
    ),
    filters=(
        search_in(
            *("name", "url", "deployment__model__title", "node__name"),
            control=Search("q", "Search by name, node or address"),
            about="Searches name, address, model and node.",
        ),
        of_model("deployment__model__name"),
        of_region("deployment__region__name"),
        Filter("gpu_type", "deployment__gpu_type__name"),
        Filter("node", "node__name"),
        Filter("open", lambda rows, names: rows, rest=False, shown=True, control=Hidden("open", length=4000)),
        Filter("state", type=InstanceState),
        Filter(
            "state",
            lambda rows, status: [row for row in rows if row["status"] == status],
            rest=False,
            shown=True,
            control=Select("state", "State", every("states", STATUSES.items())),
        ),
    ),
    page=(
        *("name", "status", "model", "region_title", "node", "gpus", "running", "waiting", "use_ratio", "kv_ratio"),
        *("output_tokens_per_s", "ttft_p95_ms", "state_since"),
    ),
    template="console/fleet/fleet.html",
    row_template="console/fleet/row.html",
    caption="",
    live="instances",
    refresh_s=10,
    whole=500,
)
IN_TREE = tuple(name for name in INSTANCES.page if name not in ("region_title", "node"))
"""Columns where rows stand below their node."""
SUMMARY = [name for name in INSTANCES.page if name not in ("node", "gpus", "state_since")]
"""Columns of the overview's table."""
