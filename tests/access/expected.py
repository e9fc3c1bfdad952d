"""Who may open what: one line for every address that there is. `test_every_address.py` fails for one that is not here.

Roles grow from left to right in `RANKS`. A tenant's people and keys reach what says TENANT, and there see their own alone;
MANAGER is an operator or admin of the tenant, or of the fleet. The fleet's people reach all else that tenants do.
"""

from dataclasses import dataclass, field
from typing import Any

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
    large: bool = False  # megabytes: in the fast tests only those read it who ask for everything


REASON = {"reason": "a test"}

# Values such as `INSTANCE` are replaced by what the test's world has.
CONSOLE = {
    "overview": Reach(VIEWER),
    "instances": Reach(VIEWER),
    "instance": Reach(VIEWER, {"name": "INSTANCE"}),
    "act": Reach(OPERATOR, {"name": "INSTANCE", "action": "drain"}, REASON),
    "rollout": Reach(OPERATOR, {"pk": "DEPLOYMENT", "action": "start"}, REASON),
    "places": Reach(VIEWER),
    "place": Reach(OPERATOR, {"kind": "region", "pk": "REGION_ID", "action": "cordon"}, REASON),
    "swap": Reach(OPERATOR, {"name": "SHARING"}, REASON),
    "models": Reach(VIEWER),
    "deploy": Reach(OPERATOR),
    "deployed": Reach(VIEWER, {"pk": "DEPLOYMENT"}),
    "bounds": Reach(ADMIN, {"pk": "MODEL_ID"}, {"max_instances-1": "6"} | REASON),
    "parts": Reach(OPERATOR, {"pk": "MODEL_ID"}, {"routing_policy": "round_robin"} | REASON),
    "what-ifs": Reach(VIEWER),
    "what-if": Reach(VIEWER, {"pk": "WHAT_IF"}),
    "new-what-if": Reach(VIEWER),
    "what-if-followed": Reach(VIEWER, {"pk": "WHAT_IF"}),
    "what-if-report": Reach(VIEWER, {"pk": "WHAT_IF"}, large=True),
    "what-if-charts": Reach(VIEWER, {"pk": "WHAT_IF"}),
    "what-if-decisions": Reach(VIEWER, {"pk": "WHAT_IF", "letter": "A"}),
    "what-if-act": Reach(OPERATOR, {"pk": "WHAT_IF", "action": "cancel"}, REASON),
    "upload-trace": Reach(OPERATOR, {}, REASON),
    "queues": Reach(VIEWER),
    "batches": Reach(TENANT),
    "batch-list": Reach(TENANT),
    "batch": Reach(TENANT, {"public_id": "BATCH_ID"}, owned=True),
    "batch-file": Reach(TENANT, {"public_id": "BATCH_ID", "kind": "input"}, owned=True),
    "cancel-batch": Reach(MANAGER, {"pk": "BATCH"}, REASON, owned=True),
    "queue-act": Reach(OPERATOR, {"number": 7, "action": "pin"}, REASON),
    "queue-charts": Reach(VIEWER),
    "held-work": Reach(VIEWER),
    "spot": Reach(VIEWER),
    "donations": Reach(VIEWER),
    "weights": Reach(VIEWER),
    "spot-stop": Reach(OPERATOR, {}, REASON),
    "pull-weights": Reach(OPERATOR, {"model": "MODEL_ID", "region": "REGION_ID"}, REASON),
    "applications": Reach(TENANT),
    "application": Reach(TENANT, {"pk": "APPLICATION"}, owned=True),
    "application-graph": Reach(TENANT, {"pk": "APPLICATION"}, owned=True),
    "run": Reach(TENANT, {"pk": "RUN"}, owned=True),
    "requests": Reach(TENANT),
    "request": Reach(TENANT, {"pk": "REQUEST"}, owned=True),
    "forecast": Reach(VIEWER),
    "scaling": Reach(VIEWER),
    "plans": Reach(VIEWER),
    "plan": Reach(VIEWER, {"pk": "PLAN"}),
    "decide": Reach(OPERATOR, {"pk": "PLAN", "decision": "reject"}, REASON),
    "moves": Reach(VIEWER),
    "policy": Reach(OPERATOR, {"pk": "MODEL_ID"}, {"strategy": "reactive", "mode": "off"} | REASON),
    "bundle": Reach(OPERATOR, {"pk": "MODEL_ID"}, {"bundle": "ssjf"} | REASON),
    "lengths": Reach(TENANT),
    "roll-back-lengths": Reach(OPERATOR, {}, REASON),
    "train-lengths": Reach(OPERATOR, {}, REASON),
    "decide-length-version": Reach(OPERATOR, {"version_number": 3, "decision": "reject"}, REASON),
    "usage": Reach(TENANT),
    "usage-charts": Reach(TENANT),
    "budgets": Reach(TENANT),
    "keys": Reach(TENANT),
    "key-created": Reach(MANAGER, {"pk": "KEY"}, owned=True),
    "revoke-key": Reach(MANAGER, {"pk": "KEY"}, REASON, owned=True),
    "system": Reach(OPERATOR),
    "settings": Reach(VIEWER),
    "setting": Reach(OPERATOR, {"name": "PLAN_EPSILON"}, {"value": "0.5"} | REASON),
    "events": Reach(VIEWER),
    "event": Reach(VIEWER, {"pk": "EVENT"}),
    "api-docs": Reach(SIGNED_IN),
    "about": Reach(VIEWER),
    "sign-in": Reach(ANYBODY),
    "sign-in-link": Reach(ANYBODY, {"token": "no-such-token"}),
    "sign-out": Reach(ANYBODY, {}, {}),
    "snapshot": Reach(VIEWER),
    "charts": Reach(VIEWER),
    "forecast-charts": Reach(VIEWER),
    "length-charts": Reach(TENANT),
    "model-charts": Reach(VIEWER),
    "scaling-charts": Reach(VIEWER),
}

DECISION = {"reason": "a test"}

# By the operations' names, as in the OpenAPI document.
REST = {
    "list_instances": Reach(VIEWER),
    "get_instance": Reach(VIEWER, {"name": "INSTANCE"}),
    "act_on_instance": Reach(OPERATOR, {"name": "INSTANCE", "action": "drain"}, REASON),
    "list_swap_groups": Reach(VIEWER),
    "start_swap": Reach(OPERATOR, {}, {"to": "SHARING"} | REASON),
    "list_regions": Reach(VIEWER),
    "list_gpu_types": Reach(VIEWER),
    "list_models": Reach(VIEWER),
    "list_slo_classes": Reach(VIEWER),
    "list_deployments": Reach(VIEWER),
    "change_deployment": Reach(ADMIN, {"deployment_id": "DEPLOYMENT"}, {"queue_bound": 7} | REASON),
    "get_rollout": Reach(VIEWER, {"deployment_id": "DEPLOYMENT"}),
    "start_rollout": Reach(OPERATOR, {"deployment_id": "DEPLOYMENT"}, REASON),
    "cancel_rollout": Reach(OPERATOR, {"deployment_id": "DEPLOYMENT"}, {}),
    "undeploy": Reach(ADMIN, {"deployment_id": "DEPLOYMENT"}, REASON),
    "retire_model": Reach(ADMIN, {"name": "MODEL"}, REASON),
    "cordon_node": Reach(OPERATOR, {"name": "node-1"}, REASON),
    "uncordon_node": Reach(OPERATOR, {"name": "node-1"}, REASON),
    "cordon_region": Reach(OPERATOR, {"name": "us-east"}, REASON),
    "uncordon_region": Reach(OPERATOR, {"name": "us-east"}, REASON),
    "get_me": Reach(SIGNED_IN, key=True),
    "list_tenants": Reach(SIGNED_IN, key=True),
    "list_keys": Reach(SIGNED_IN, key=True),
    "create_key": Reach(MANAGER, {}, {"tenant": "acme", "name": "another"}, owned=True),
    "revoke_key": Reach(MANAGER, {"key_id": "KEY"}, REASON, owned=True),
    "list_budgets": Reach(SIGNED_IN, key=True),
    "create_budget": Reach(ADMIN, {}, {"tenant": "acme", "kind": "tokens_per_minute", "hard": 5} | REASON),
    "change_budget": Reach(ADMIN, {"budget_id": "BUDGET"}, {"hard": 500} | REASON),
    "remove_budget": Reach(ADMIN, {"budget_id": "BUDGET"}, REASON),
    "list_events": Reach(SIGNED_IN),
    "list_requests": Reach(SIGNED_IN, key=True),
    "get_usage": Reach(SIGNED_IN, key=True),
    "sum_usage": Reach(SIGNED_IN, key=True),
    "list_waiting": Reach(SIGNED_IN, key=True),
    "list_wait_estimates": Reach(VIEWER),
    "get_summary": Reach(VIEWER),
    "list_endpoints": Reach(VIEWER),
    "list_forecasts": Reach(VIEWER),
    "list_backtests": Reach(VIEWER),
    "list_policies": Reach(VIEWER),
    "set_policy": Reach(OPERATOR, {"model": "MODEL"}, {"strategy": "reactive", "mode": "off"} | REASON),
    "list_bundles": Reach(VIEWER),
    "get_bundle": Reach(VIEWER, {"model": "MODEL"}),
    "switch_bundle": Reach(OPERATOR, {"model": "MODEL"}, {"bundle": "ssjf"} | REASON),
    "switch_parts": Reach(OPERATOR, {"model": "MODEL"}, {"routing_policy": "round_robin"} | REASON),
    "list_queues": Reach(VIEWER),
    "get_queue_group": Reach(VIEWER, {"number": 7}),
    "act_on_queue_group": Reach(OPERATOR, {"number": 7, "action": "pin"}, REASON),
    "list_plans": Reach(VIEWER),
    "get_plan": Reach(VIEWER, {"plan_id": "PLAN"}),
    "approve_plan": Reach(OPERATOR, {"plan_id": "PLAN"}, DECISION),
    "reject_plan": Reach(OPERATOR, {"plan_id": "PLAN"}, DECISION),
    "list_moves": Reach(VIEWER),
    "list_comparisons": Reach(VIEWER),
    "list_lengths": Reach(VIEWER),
    "list_length_versions": Reach(VIEWER),
    "list_length_trainings": Reach(VIEWER),
    "promote_length_version": Reach(OPERATOR, {"number": 3}, DECISION),
    "put_length_version_in_shadow": Reach(OPERATOR, {"number": 4}, DECISION),
    "reject_length_version": Reach(OPERATOR, {"number": 3}, DECISION),
    "roll_back_length_version": Reach(OPERATOR, {"number": 2}, DECISION),
    "train_length_model": Reach(OPERATOR, {}, DECISION),
    "list_batches": Reach(SIGNED_IN, key=True),
    "list_donations": Reach(VIEWER),
    "list_weights": Reach(VIEWER),
    "get_spot_pool": Reach(VIEWER),
    "get_dollars_by_use": Reach(VIEWER),
    "stop_donating": Reach(OPERATOR, {}, REASON),
    "pull_weights": Reach(OPERATOR, {}, {"model": "llama-3.1-8b", "region": "us-west"} | REASON),
    "list_applications": Reach(SIGNED_IN, key=True),
    "list_runs": Reach(SIGNED_IN, key=True),
    "get_application_graph": Reach(TENANT, {"application_id": "APPLICATION"}, owned=True, key=True),
    "import_application_graph": Reach(MANAGER, {}, {"tenant": "acme", "graph": {"version": 0}}, owned=True),
    "list_settings": Reach(VIEWER),
    "change_setting": Reach(OPERATOR, {"name": "PLAN_EPSILON"}, {"value": 0.5} | REASON),
    "reset_setting": Reach(OPERATOR, {"name": "PLAN_EPSILON"}, {}),
    "list_simulations": Reach(VIEWER),
    "get_simulation": Reach(VIEWER, {"number": "SIMULATION"}),
    "run_simulation": Reach(OPERATOR, {}, {"scenario": {}} | REASON),
    "cancel_simulation": Reach(OPERATOR, {"number": "SIMULATION"}, REASON),
    "ask_what_if": Reach(OPERATOR, {}, {"begin": {"kind": "synthetic"}}),
    "list_what_ifs": Reach(VIEWER),
    "get_what_if": Reach(VIEWER, {"number": "WHAT_IF"}),
    "run_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, {}),
    "cancel_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, REASON),
    "resume_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, REASON),
    "add_what_if_seeds": Reach(OPERATOR, {"number": "WHAT_IF"}, {"count": 1}),
    "delete_what_if": Reach(OPERATOR, {"number": "WHAT_IF"}, {}),
    "compare_futures": Reach(VIEWER, {"number": "WHAT_IF"}),
    "get_what_if_curves": Reach(VIEWER, {"number": "WHAT_IF"}),
    "export_what_if_runs": Reach(VIEWER, {"number": "WHAT_IF"}),
    "export_what_if_futures": Reach(VIEWER, {"number": "WHAT_IF"}),
    "export_what_if_report": Reach(VIEWER, {"number": "WHAT_IF"}, large=True),
    "choose_future": Reach(OPERATOR, {"number": "WHAT_IF"}, {"future": "A"}),
    "check_what_if_plan": Reach(VIEWER, {"number": "WHAT_IF"}),
    "make_what_if_plan": Reach(OPERATOR, {"number": "WHAT_IF"}, {"future": "A"} | REASON),
    "undo_what_if_plan": Reach(OPERATOR, {"number": "WHAT_IF"}, REASON),
    "follow_what_if_plan": Reach(VIEWER, {"number": "WHAT_IF"}),
    "list_counterfactuals": Reach(VIEWER),
    "list_twin_errors": Reach(VIEWER),
    "list_what_if_presets": Reach(VIEWER),
    "list_traces": Reach(VIEWER),
    "upload_trace": Reach(OPERATOR, {}, {}),
    "get_system": Reach(OPERATOR),
    "get_instance_log": Reach(OPERATOR, {"name": "INSTANCE"}),
    "list_nodes": Reach(VIEWER),
    "deploy": Reach(OPERATOR, {}, {"region": "us-east", "gpu_type": "a100-80gb", "model": "MODEL", "gpus": 8}),
    "create_region": Reach(ADMIN, {}, {"name": "eu-new", "title": "New"}),
    "change_region": Reach(ADMIN, {"name": "us-east"}, {"title": "Newer"}),
    "delete_region": Reach(ADMIN, {"name": "us-east"}, {}),
    "list_region_latencies": Reach(VIEWER),
    "put_region_latency": Reach(ADMIN, {"origin": "us-east", "target": "us-west"}, {"latency_ms": 30.0} | REASON),
    "delete_region_latency": Reach(ADMIN, {"origin": "us-east", "target": "us-west"}, {}),
    "create_gpu_type": Reach(
        ADMIN, {}, {"name": "b200", "title": "B200", "memory_bytes": 2**37, "on_demand_usd_per_hour": "4.0"}
    ),
    "change_gpu_type": Reach(ADMIN, {"name": "a100-80gb"}, {"title": "Newer"}),
    "delete_gpu_type": Reach(ADMIN, {"name": "a100-80gb"}, {}),
    "create_node": Reach(ADMIN, {}, {"name": "new", "region": "us-east", "gpu_type": "a100-80gb", "gpu_count": 8}),
    "change_node": Reach(ADMIN, {"name": "node-1"}, {"gpu_count": 16}),
    "delete_node": Reach(ADMIN, {"name": "node-1"}, {}),
    "create_model": Reach(ADMIN, {}, {"name": "another"}),
    "change_model": Reach(ADMIN, {"name": "MODEL"}, {"title": "Newer"}),
    "delete_model": Reach(ADMIN, {"name": "MODEL"}, {}),
    "create_slo_class": Reach(ADMIN, {}, {"name": "new", "title": "New", "kind": "interactive"}),
    "change_slo_class": Reach(ADMIN, {"name": "interactive"}, {"title": "Newer"}),
    "delete_slo_class": Reach(ADMIN, {"name": "interactive"}, {}),
    "create_tenant": Reach(ADMIN, {}, {"name": "initech", "default_slo_class": "interactive"}),
    "change_tenant": Reach(ADMIN, {"name": "acme"}, {"title": "Newer"}),
    "create_instance": Reach(ADMIN, {}, {"name": "new", "model": "MODEL", "region": "us-east"}),
    "change_instance": Reach(ADMIN, {"name": "INSTANCE"}, {}),
    "delete_instance": Reach(ADMIN, {"name": "INSTANCE"}, {}),
    "create_deployment": Reach(ADMIN, {}, {"model": "MODEL", "region": "us-east", "gpu_type": "a100-80gb"}),
    "delete_deployment": Reach(ADMIN, {"deployment_id": "DEPLOYMENT"}, {}),
}
# What says that there is nothing, and the document of what there is.
REST_OTHERS = {"nothing_here": 404, "openapi-json": 200, "api-root": 404}

EDITED = ("add", "change", "delete")

# For each model of the admin: the least role that reads it, and what an admin may do there.
ADMIN_MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "accounts.apikey": (VIEWER, ("add",)),
    "accounts.budget": (VIEWER, EDITED),
    "accounts.membership": (VIEWER, EDITED),
    "accounts.signinlink": (ADMIN, ()),
    "accounts.tenant": (VIEWER, EDITED),
    "accounts.user": (ADMIN, EDITED),
    "events.event": (VIEWER, ()),
    "fleet.deployment": (VIEWER, EDITED),
    "fleet.gputype": (VIEWER, EDITED),
    "fleet.instance": (VIEWER, EDITED),
    "fleet.instancecommand": (VIEWER, ()),
    "fleet.model": (VIEWER, EDITED),
    "fleet.node": (VIEWER, EDITED),
    "fleet.performanceprofile": (VIEWER, EDITED),
    "fleet.region": (VIEWER, EDITED),
    "fleet.regionlatency": (VIEWER, EDITED),
    "fleet.rollout": (VIEWER, ()),
    "fleet.sloclass": (VIEWER, EDITED),
    "fleet.swap": (VIEWER, ()),
    "fleet.swapgroup": (VIEWER, EDITED),
    "fleet.weights": (VIEWER, EDITED),
    "gateway.ledgerrow": (VIEWER, ()),
    "gateway.minuterow": (VIEWER, ()),
    "lengths.lengthminute": (VIEWER, ()),
    "lengths.lengthsample": (VIEWER, ()),
    "lengths.lengthtraining": (VIEWER, ()),
    "lengths.lengthversion": (VIEWER, ()),
    "planning.backtest": (VIEWER, ()),
    "planning.forecast": (VIEWER, ()),
    "planning.scalingmove": (VIEWER, ()),
    "planning.scalingplan": (VIEWER, ()),
    "planning.scalingpolicy": (VIEWER, EDITED),
    "planning.strategycomparison": (VIEWER, ()),
    "tuning.setting": (VIEWER, EDITED),
    "usage.usagehour": (VIEWER, ()),
    "whatif.counterfactual": (VIEWER, ()),
    "whatif.future": (VIEWER, ()),
    "whatif.futureseed": (VIEWER, ()),
    "whatif.tracefile": (VIEWER, ()),
    "whatif.twinerror": (VIEWER, ()),
    "whatif.whatif": (VIEWER, ()),
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
    "accounts_user_link": ADMIN,
    "accounts_apikey_created": ADMIN,
    "auth_user_password_change": ADMIN,
}

SOCKETS = {"^ws/live/$"}
# By the topics of the live connection.
TOPICS = {"overview:": VIEWER, "batches": VIEWER, "held": VIEWER,
          "instances": VIEWER, "instance:1": VIEWER, "queues:us-east": VIEWER, "what-if:1": VIEWER,
          "lengths": VIEWER, "events": VIEWER, "system": OPERATOR}  # fmt: skip

# Outside of Django: status for a client that is not on this machine.
OPERATIONS = {"/healthz": 200, "/readyz": 503, "/metrics": 401, "/version": 200}
OPERATIONS |= dict.fromkeys(("/health", "/v1/health", "/ping"), 503)  # nothing is served yet
