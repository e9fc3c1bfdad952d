"""Who may open what: one line for every address that there is. `test_every_address.py` fails for one that is not here.

Roles grow from left to right in `RANKS`. A tenant's people and keys reach what says TENANT, and there see their own alone;
MANAGER is an operator or admin of the tenant, or of the fleet. The fleet's people reach all else that tenants do.
"""

from dataclasses import dataclass, field
from typing import Any

from controlplane.fleet.lifecycle.states import Action

ANYBODY, SIGNED_IN, TENANT, MANAGER, VIEWER, OPERATOR, ADMIN = range(7)

# What each role reaches at most.
RANKS = {
    "anonymous": ANYBODY,
    "newcomer": SIGNED_IN,  # of no tenant
    "member": TENANT,  # viewer of acme
    "key_manager": MANAGER,  # operator of acme
    "stranger": MANAGER,  # admin of globex
    "viewer": VIEWER,
    "operator": OPERATOR,
    "fleet_admin": ADMIN,
}
OF_ACME, OF_GLOBEX = ("member", "key_manager"), ("stranger",)
OF_THE_FLEET = ("viewer", "operator", "fleet_admin")


@dataclass(frozen=True)
class Reach:
    """The least role, what stands in the path, and what is sent. *owned*: of acme, so that others do not find it."""

    least: int
    path: dict[str, Any] = field(default_factory=dict)
    send: dict[str, Any] | None = None  # a POST (or as the REST operation says) with these values
    owned: bool = False
    key: bool = False  # REST: with an API key too


REASON = {"reason": "a test"}

# Values such as `INSTANCE` are replaced by what the test's world has.
CONSOLE = {
    "timeline": Reach(VIEWER),
    "overview": Reach(VIEWER),
    "fleet": Reach(VIEWER),
    "bulk": Reach(OPERATOR, {}, {"instance": "INSTANCE_ID", "verb": "drain"} | REASON),
    "instance": Reach(VIEWER, {"name": "INSTANCE"}),
    "node": Reach(VIEWER, {"name": "node-1"}),
    "models": Reach(VIEWER),
    "deploy": Reach(OPERATOR),
    "deployed": Reach(VIEWER, {"pk": "DEPLOYMENT"}),
    "change-model fallback": Reach(ADMIN, {"pk": "MODEL_ID", "form": "fallback"}, {"fallback": ""} | REASON),
    "change-model bounds": Reach(ADMIN, {"pk": "MODEL_ID", "form": "bounds"}, {"max_instances-1": "6"} | REASON),
    "change-model parts": Reach(
        OPERATOR, {"pk": "MODEL_ID", "form": "parts"}, {"routing_policy": "round_robin"} | REASON
    ),
    "change-model shard": Reach(OPERATOR, {"pk": "MODEL_ID", "form": "shard"}, {"shard": "1"} | REASON),
    "what-ifs": Reach(VIEWER),
    "what-if": Reach(VIEWER, {"pk": "WHAT_IF"}),
    "new-what-if": Reach(VIEWER),
    "playground": Reach(TENANT),
    "playground-key": Reach(MANAGER, {}, {"tenant": "acme"}, owned=True),
    "playground-decision": Reach(TENANT),
    "what-if-charts": Reach(VIEWER, {"pk": "WHAT_IF"}),
    "what-if-act": Reach(OPERATOR, {"pk": "WHAT_IF", "action": "cancel"}, REASON),
    "upload-trace": Reach(OPERATOR, {}, REASON),
    "capacity": Reach(VIEWER),
    "capacity-plan": Reach(VIEWER, {"pk": "CAPACITY_PLAN"}),
    "capacity-file": Reach(VIEWER, {"pk": "CAPACITY_PLAN"}),
    "capacity-what-if": Reach(OPERATOR, {"pk": "CAPACITY_PLAN"}, REASON),
    "queues": Reach(VIEWER),
    "batches": Reach(TENANT),
    "batch": Reach(TENANT, {"public_id": "BATCH_ID"}, owned=True),
    "batch-file": Reach(TENANT, {"public_id": "BATCH_ID", "kind": "input"}, owned=True),
    "queue-act": Reach(OPERATOR, {"number": 7, "action": "pin"}, REASON),
    "stop-donating": Reach(OPERATOR, {}, REASON),
    "applications": Reach(TENANT),
    "application": Reach(TENANT, {"pk": "APPLICATION"}, owned=True),
    "application-graph": Reach(TENANT, {"pk": "APPLICATION"}, owned=True),
    "limit-runs": Reach(MANAGER, {"pk": "APPLICATION"}, REASON, owned=True),
    "import-graph": Reach(MANAGER, {}, {"tenant": "acme"}, owned=True),
    "run": Reach(TENANT, {"pk": "RUN"}, owned=True),
    "requests": Reach(TENANT),
    "request": Reach(TENANT, {"pk": "REQUEST"}, owned=True),
    "scaling": Reach(VIEWER),
    "calendar": Reach(VIEWER),
    "schedule": Reach(
        ADMIN,
        {},
        {"name": "night", "model": "llama-3.1-8b", "instances": "1", "begins": "22:00", "ends": "06:00"} | REASON,
    ),
    "change-model policy": Reach(
        OPERATOR, {"pk": "MODEL_ID", "form": "policy"}, {"strategy": "reactive", "mode": "off"} | REASON
    ),
    "change-model bundle": Reach(OPERATOR, {"pk": "MODEL_ID", "form": "bundle"}, {"bundle": "ssjf"} | REASON),
    "train-lengths": Reach(OPERATOR, {}, REASON),
    "search": Reach(TENANT),
    "add-node": Reach(OPERATOR, {}, {"region": "first", "gpu_type": "h100-80gb", "gpus": "8", "usd_per_gpu_hour": "2"}),
    "first-tenant": Reach(ADMIN, {}, {"name": "Newco"}),
    "usage": Reach(TENANT),
    "prices": Reach(VIEWER),
    "keys": Reach(TENANT),
    "model": Reach(VIEWER, {"name": "llama-3.1-8b"}),
    "change-model share": Reach(
        ADMIN, {"pk": "MODEL_ID", "form": "share"}, {"name": "chat", "targets": "llama-3.1-8b 1"} | REASON
    ),
    "change-model engine": Reach(ADMIN, {"pk": "MODEL_ID", "form": "engine"}, {"max_num_seqs": "8"} | REASON),
    "key-models": Reach(MANAGER, {"pk": "KEY"}, {"allowed_models": "llama-3.1-8b"} | REASON, owned=True),
    "system": Reach(OPERATOR),
    "alerts": Reach(VIEWER),
    "silence": Reach(OPERATOR, {"pk": "ALERT"}, {"hours": "4"} | REASON),
    "users": Reach(ADMIN),
    "user-link": Reach(ADMIN, {"pk": "USER"}, {}),
    "settings": Reach(VIEWER),
    "setting": Reach(OPERATOR, {"name": "PLAN_EPSILON"}, {"value": "0.5"} | REASON),
    "events": Reach(VIEWER),
    "event": Reach(VIEWER, {"pk": "EVENT"}),
    "undo": Reach(ADMIN, {"pk": "UNDONE"}, REASON),
    "api-docs": Reach(SIGNED_IN),
    "sign-in": Reach(ANYBODY),
    "sign-in-link": Reach(ANYBODY, {"token": "no-such-token"}),
    "sign-out": Reach(ANYBODY, {}, {}),
    **{
        f"operate {name} {verb}": Reach(least, {"name": name, "pk": pk, "verb": verb}, REASON, owned=owned)
        for name, pk, verbs, least, owned in (
            ("alert-rules", "ALERT_RULE", ("test",), ADMIN, False),
            ("alerts", "ALERT", ("acknowledge",), OPERATOR, False),
            ("batches", "BATCH", ("cancel",), MANAGER, True),
            ("deployments", "DEPLOYMENT", ("undeploy", "activate"), ADMIN, False),
            ("deployments", "DEPLOYMENT", ("roll-out", "cancel-rollout", "roll-back"), OPERATOR, False),
            ("gpus", "GPU_ID", ("cordon", "uncordon"), OPERATOR, False),
            ("instances", "INSTANCE_ID", tuple(Action.values), OPERATOR, False),
            ("instances", "SHARING_ID", ("swap",), OPERATOR, False),
            ("keys", "KEY", ("revoke",), MANAGER, True),
            ("length-versions", "VERSION", ("promote", "rollback"), OPERATOR, False),
            ("maintenance", "MAINTENANCE", ("end",), OPERATOR, False),
            ("models", "MODEL_ID", ("retire", "activate"), ADMIN, False),
            ("nodes", "NODE_ID", ("cordon", "uncordon", "maintenance"), OPERATOR, False),
            ("plans", "PLAN", ("approve", "reject", "undo"), OPERATOR, False),
            ("regions", "REGION_ID", ("cordon", "uncordon", "maintenance"), OPERATOR, False),
            ("shards", "SHARD_ID", ("hand-over",), OPERATOR, False),
            ("stock", "STOCK_ID", ("pull",), OPERATOR, False),
            ("runs", "RUN", ("first", "stop"), OPERATOR, False),
        )
        for verb in verbs
    },
}
"""Addresses by name; of one with several, the name and a word more."""

DECISION = {"reason": "a test"}

# By the operations' names, as in the OpenAPI document.
REST = {
    "list_instances": Reach(VIEWER),
    "get_instance": Reach(VIEWER, {"name": "INSTANCE"}),
    "get_instance_log": Reach(OPERATOR, {"name": "INSTANCE"}),
    "act_on_instance": Reach(OPERATOR, {"name": "INSTANCE", "action": "drain"}, REASON),
    "list_regions": Reach(VIEWER),
    "act_on_region": Reach(OPERATOR, {"name": "us-east", "action": "cordon"}, REASON),
    "list_nodes": Reach(VIEWER),
    "act_on_node": Reach(OPERATOR, {"name": "node-1", "action": "cordon"}, REASON),
    "list_maintenance": Reach(VIEWER),
    "end_maintenance": Reach(OPERATOR, {"pk": "MAINTENANCE"}, REASON),
    "list_gpus": Reach(VIEWER),
    "act_on_gpu": Reach(OPERATOR, {"pk": "GPU_ID", "action": "cordon"}, REASON),
    "list_stock": Reach(VIEWER),
    "pull_stock": Reach(OPERATOR, {"pk": "STOCK_ID"}, REASON),
    "list_shards": Reach(VIEWER),
    "hand_over_owner": Reach(OPERATOR, {"pk": "SHARD_ID"}, REASON),
    "list_models": Reach(VIEWER),
    "retire_model": Reach(ADMIN, {"name": "MODEL"}, REASON),
    "list_deployments": Reach(VIEWER),
    "act_on_deployment": Reach(OPERATOR, {"pk": "DEPLOYMENT", "action": "roll-out"}, REASON),
    "get_rollout": Reach(VIEWER, {"deployment_id": "DEPLOYMENT"}),
    "list_target_comparisons": Reach(VIEWER),
    "list_inventory": Reach(VIEWER, {"kind": "slo_classes"}),
    "apply_inventory": Reach(ADMIN, {}, {"regions": [{"name": "eu-new", "title": "New"}]}),
    "delete_from_inventory": Reach(ADMIN, {"kind": "regions", "name": "us-east"}, {}),
    "deploy": Reach(OPERATOR, {}, {"region": "us-east", "gpu_type": "a100-80gb", "model": "MODEL", "gpus": 8}),
    "get_me": Reach(SIGNED_IN, key=True),
    "list_tenants": Reach(SIGNED_IN, key=True),
    "list_keys": Reach(SIGNED_IN, key=True),
    "create_key": Reach(MANAGER, {}, {"tenant": "acme", "name": "another"}, owned=True),
    "change_key": Reach(MANAGER, {"key_id": "KEY"}, {"allowed_models": [], "revoked": True} | REASON, owned=True),
    "list_prices": Reach(VIEWER),
    "add_price": Reach(
        ADMIN, {}, {"of": "gpu", "name": "h100", "amount": 2.5, "from_at": "2026-11-01T00:00:00Z"} | REASON
    ),
    "list_budgets": Reach(SIGNED_IN, key=True),
    "create_budget": Reach(ADMIN, {}, {"tenant": "acme", "kind": "tokens_per_minute", "hard": 5} | REASON),
    "change_budget": Reach(ADMIN, {"pk": "BUDGET"}, {"hard": 500} | REASON),
    "delete_budget": Reach(ADMIN, {"pk": "BUDGET"}, {}),
    "list_alerts": Reach(VIEWER),
    "act_on_alert": Reach(OPERATOR, {"pk": "ALERT", "action": "acknowledge"}, REASON),
    "list_alert_rules": Reach(VIEWER),
    "create_alert_rule": Reach(ADMIN, {}, {"name": "another", "condition": "job"}),
    "change_alert_rule": Reach(ADMIN, {"pk": "ALERT_RULE"}, {"for_s": 60}),
    "delete_alert_rule": Reach(ADMIN, {"pk": "ALERT_RULE"}, {}),
    "test_alert_rule": Reach(ADMIN, {"rule_id": "ALERT_RULE"}, {}),
    "list_users": Reach(ADMIN),
    "create_user": Reach(ADMIN, {}, {"username": "another"}),
    "change_user": Reach(ADMIN, {"pk": "USER"}, {"email": "a@example.com"}),
    "delete_user": Reach(ADMIN, {"pk": "USER"}, {}),
    "list_memberships": Reach(ADMIN),
    "create_membership": Reach(ADMIN, {}, {"user": "member", "tenant": "globex", "role": "viewer"}),
    "change_membership": Reach(ADMIN, {"pk": "MEMBERSHIP"}, {"role": "admin"}),
    "delete_membership": Reach(ADMIN, {"pk": "MEMBERSHIP"}, {}),
    "list_events": Reach(SIGNED_IN),
    "list_requests": Reach(SIGNED_IN, key=True),
    "sum_usage": Reach(SIGNED_IN, key=True),
    "list_waiting": Reach(SIGNED_IN, key=True),
    "get_summary": Reach(VIEWER),
    "list_endpoints": Reach(VIEWER),
    "list_policies": Reach(VIEWER),
    "change_policy": Reach(OPERATOR, {"model": "MODEL"}, {"strategy": "reactive", "mode": "off"} | REASON),
    "list_plans": Reach(VIEWER),
    "get_plan": Reach(VIEWER, {"plan_id": "PLAN"}),
    "act_on_scaling_plan": Reach(OPERATOR, {"pk": "PLAN", "action": "approve"}, DECISION),
    "list_moves": Reach(VIEWER),
    "list_donations": Reach(VIEWER),
    "list_lengths": Reach(VIEWER),
    "list_length_versions": Reach(VIEWER),
    "act_on_length_version": Reach(OPERATOR, {"number": 3, "action": "promote"}, DECISION),
    "train_length_model": Reach(OPERATOR, {}, DECISION),
    "list_batches": Reach(SIGNED_IN, key=True),
    "list_applications": Reach(SIGNED_IN, key=True),
    "list_runs": Reach(SIGNED_IN, key=True),
    "get_run": Reach(TENANT, {"run_id": "RUN"}, owned=True, key=True),
    "get_application_graph": Reach(TENANT, {"application_id": "APPLICATION"}, owned=True, key=True),
    "limit_application_runs": Reach(MANAGER, {"application_id": "APPLICATION"}, REASON, owned=True),
    "act_on_application_run": Reach(OPERATOR, {"run_id": "RUN", "action": "first"}, REASON),
    "list_settings": Reach(VIEWER),
    "change_setting": Reach(OPERATOR, {"name": "PLAN_EPSILON"}, {"value": 0.5} | REASON),
    "ask_what_if": Reach(OPERATOR, {}, {"begin": {"kind": "synthetic"}}),
    "list_what_ifs": Reach(VIEWER),
    "plan_capacity": Reach(OPERATOR, {}, {"gpus": {"none": 1.0}}),
    "list_capacity_plans": Reach(VIEWER),
    "get_capacity_plan": Reach(VIEWER, {"number": "CAPACITY_PLAN"}),
    "get_capacity_fleet_file": Reach(VIEWER, {"number": "CAPACITY_PLAN"}),
    "list_region_losses": Reach(VIEWER),
    "get_what_if": Reach(VIEWER, {"number": "WHAT_IF"}),
    "change_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, {"state": "cancelled"}),
    "delete_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, {}),
    "compare_futures": Reach(VIEWER, {"number": "WHAT_IF"}),
    "make_what_if_plan": Reach(OPERATOR, {"number": "WHAT_IF"}, {"future": "A"} | REASON),
    "list_traces": Reach(VIEWER),
    "upload_trace": Reach(OPERATOR, {}, {}),
    "get_system": Reach(OPERATOR),
}
# What says that there is nothing, and the document of what there is.
REST_OTHERS = {"nothing_here": 404, "openapi-json": 200, "api-root": 404}

EDITED = ("add", "change", "delete")

# For each model of the admin: the least role that reads it, and what an admin may do there.
ADMIN_MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "accounts.tenant": (VIEWER, ("add", "change")),
    "applications.unitbackend": (VIEWER, EDITED),
    "fleet.adapter": (VIEWER, EDITED),
    "fleet.deployment": (VIEWER, EDITED),
    "fleet.gputype": (VIEWER, EDITED),
    "fleet.instance": (VIEWER, EDITED),
    "fleet.model": (VIEWER, EDITED),
    "fleet.node": (VIEWER, EDITED),
    "fleet.performanceprofile": (VIEWER, EDITED),
    "fleet.region": (VIEWER, EDITED),
    "fleet.scheduledminimum": (VIEWER, EDITED),
    "fleet.sloclass": (VIEWER, EDITED),
    "fleet.swapgroup": (VIEWER, EDITED),
    "fleet.weightedtarget": (VIEWER, EDITED),
}
# Pages of the admin alongside those of its models.
ADMIN_PAGES = {
    "index": VIEWER,
    "login": ANYBODY,
    "logout": ANYBODY,
    "password_change": VIEWER,
    "password_change_done": VIEWER,
    "autocomplete": VIEWER,
    "jsi18n": VIEWER,
    "view_on_site": VIEWER,
    "app_list": VIEWER,
}

SOCKETS = {"^ws/live/$"}
# By the topics of the live connection.
TOPICS = {"overview:": VIEWER, "batches": VIEWER,
          "instances": VIEWER, "instance:1": VIEWER, "queues:us-east": VIEWER, "what-if:1": VIEWER, "capacity:1": VIEWER,
          "events": VIEWER, "system": OPERATOR}  # fmt: skip

# Outside of Django: status for a client that is not on this machine.
OPERATIONS = {"/healthz": 200, "/readyz": 503, "/metrics": 401, "/version": 200}
OPERATIONS |= dict.fromkeys(("/health", "/v1/health", "/ping"), 503)  # nothing is served yet
