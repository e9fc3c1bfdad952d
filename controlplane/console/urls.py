"""Paths of the console, page by page, and those of the live connection."""

from typing import Any, cast

from django.urls import path, re_path

from controlplane.console.live.consumers import LiveConsumer
from controlplane.console.operations import operate
from controlplane.console.pages.alerts import views as alerts
from controlplane.console.pages.applications import views as applications
from controlplane.console.pages.batches import views as batches
from controlplane.console.pages.capacity import views as capacity
from controlplane.console.pages.deploy import views as deploy
from controlplane.console.pages.events import views as events
from controlplane.console.pages.fleet import views as fleet
from controlplane.console.pages.keys import views as keys
from controlplane.console.pages.models import views as models
from controlplane.console.pages.models.forms import change, train
from controlplane.console.pages.overview import first_steps, timeline
from controlplane.console.pages.overview import views as overview
from controlplane.console.pages.playground import views as playground
from controlplane.console.pages.queues import views as queues
from controlplane.console.pages.requests import views as requests
from controlplane.console.pages.scaling import views as scaling
from controlplane.console.pages.search import views as search
from controlplane.console.pages.settings import views as settings
from controlplane.console.pages.sign_in import views as sign_in
from controlplane.console.pages.system import views as system
from controlplane.console.pages.usage import views as usage
from controlplane.console.pages.users import views as users
from controlplane.console.pages.what_if import building
from controlplane.console.pages.what_if import views as what_if

app_name = "console"
urlpatterns = [
    path("operations/<slug:name>/<int:pk>/<slug:verb>/", operate, name="operate"),
    path("", overview.overview, name="overview"),
    path("first-steps/node/", first_steps.add_node, name="add-node"),
    path("first-steps/tenant/", first_steps.first_tenant, name="first-tenant"),
    path("timeline/", timeline.timeline, name="timeline"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("fleet/act/", fleet.bulk, name="bulk"),
    path("fleet/instances/<slug:name>/", fleet.instance, name="instance"),
    path("fleet/nodes/<slug:name>/", fleet.node, name="node"),
    path("fleet/stop-donating/", fleet.stop_donating, name="stop-donating"),
    path("models/", models.models, name="models"),
    path("models/deploy/", deploy.deploy, name="deploy"),
    path("models/deployed/<int:pk>/", deploy.deployed, name="deployed"),
    path("models/<int:pk>/<slug:form>/", change, name="change-model"),
    path("models/lengths/train/", train, name="train-lengths"),
    path("models/<path:name>/", models.model, name="model"),
    path("queues/", queues.queues, name="queues"),
    path("queues/groups/<int:number>/<slug:action>/", queues.act, name="queue-act"),
    path("batches/", batches.batches, name="batches"),
    path("batches/<str:public_id>/", batches.batch, name="batch"),
    path("batches/<str:public_id>/<slug:kind>.jsonl", batches.file, name="batch-file"),
    path("applications/", applications.applications, name="applications"),
    path("applications/<int:pk>/", applications.application, name="application"),
    path("applications/<int:pk>/graph.json", applications.export, name="application-graph"),
    path("applications/<int:pk>/limits/", applications.limit_runs, name="limit-runs"),
    path("applications/import/", applications.import_graph, name="import-graph"),
    path("applications/runs/<int:pk>/", applications.run, name="run"),
    path("playground/", playground.playground, name="playground"),
    path("playground/key/", playground.key, name="playground-key"),
    path("playground/decision/", playground.decision, name="playground-decision"),
    path("requests/", requests.requests, name="requests"),
    path("requests/<int:pk>/", requests.request_detail, name="request"),
    path("scaling/", scaling.scaling, name="scaling"),
    path("scaling/calendar/", scaling.calendar, name="calendar"),
    path("scaling/calendar/schedule/", scaling.schedule, name="schedule"),
    path("what-if/", what_if.what_ifs, name="what-ifs"),
    path("what-if/new", building.build, name="new-what-if"),
    path("what-if/traces/", building.upload, name="upload-trace"),
    path("what-if/<int:pk>/", what_if.what_if, name="what-if"),
    path("what-if/<int:pk>/<slug:action>/", what_if.act, name="what-if-act"),
    path("console/api/what-if-charts/<int:pk>", what_if.charts, name="what-if-charts"),
    path("search/", search.search, name="search"),
    path("capacity/", capacity.capacity, name="capacity"),
    path("capacity/<int:pk>/", capacity.capacity, name="capacity-plan"),
    path("capacity/<int:pk>/fleet.toml", capacity.file, name="capacity-file"),
    path("capacity/<int:pk>/what-if/", capacity.what_if, name="capacity-what-if"),
    path("usage/", usage.usage_page, name="usage"),
    path("usage/prices/", usage.prices, name="prices"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<int:pk>/models/", keys.models, name="key-models"),
    path("system/", system.system, name="system"),
    path("alerts/", alerts.alerts, name="alerts"),
    path("alerts/<int:pk>/silence/", alerts.silence, name="silence"),
    path("users/", users.users, name="users"),
    path("users/<int:pk>/link/", users.link, name="user-link"),
    path("settings/", settings.settings, name="settings"),
    path("settings/<str:name>/", settings.change, name="setting"),
    path("events/", events.events, name="events"),
    path("events/<int:pk>/", events.event, name="event"),
    path("events/<int:pk>/undo/", events.undo, name="undo"),
    path("api/docs", keys.api_docs, name="api-docs"),
    path("sign-in/", sign_in.sign_in, name="sign-in"),
    path("sign-in/<str:token>/", sign_in.sign_in_by_link, name="sign-in-link"),
    path("sign-out/", sign_in.sign_out, name="sign-out"),
]
# Channels calls what stands here as an ASGI application; to Django's types it is no view.
websocket_urlpatterns: list[Any] = [re_path(r"^ws/live/$", cast(Any, LiveConsumer.as_asgi()))]
