"""Paths of the console's pages and of its live connection."""

from typing import Any, cast

from django.urls import path, re_path

from controlplane.console.consumers import live as live_connection
from controlplane.console.views import (
    about,
    events,
    forecast,
    instances,
    keys,
    lengths,
    live,
    overview,
    plans,
    requests,
    rollouts,
    scaling,
    sign_in,
    system,
)

app_name = "console"
urlpatterns = [
    path("", overview.overview, name="overview"),
    path("instances/", instances.instances, name="instances"),
    path("instances/<slug:name>/", instances.instance, name="instance"),
    path("instances/<slug:name>/<slug:action>/", instances.act, name="act"),
    path("rollouts/<int:pk>/<slug:action>/", rollouts.act, name="rollout"),
    path("requests/", requests.requests, name="requests"),
    path("requests/<int:pk>/", requests.request_detail, name="request"),
    path("forecast/", forecast.forecast, name="forecast"),
    path("scaling/", scaling.scaling, name="scaling"),
    path("scaling/plans/", plans.plans, name="plans"),
    path("scaling/plans/<int:pk>/", plans.plan, name="plan"),
    path("scaling/plans/<int:pk>/<slug:decision>/", scaling.decide, name="decide"),
    path("scaling/moves/", plans.moves, name="moves"),
    path("scaling/policies/<int:pk>/", scaling.policy, name="policy"),
    path("lengths/", lengths.lengths, name="lengths"),
    path("lengths/roll-back/", lengths.roll_back, name="roll-back-lengths"),
    path("lengths/train/", lengths.train, name="train-lengths"),
    path("lengths/versions/<int:version_number>/<slug:decision>/", lengths.decide, name="decide-length-version"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<int:pk>/created/", keys.created, name="key-created"),
    path("keys/<int:pk>/revoke/", keys.revoke, name="revoke-key"),
    path("system/", system.system, name="system"),
    path("events/", events.events, name="events"),
    path("events/<int:pk>/", events.event, name="event"),
    path("about/", about.about, name="about"),
    path("sign-in/", sign_in.sign_in, name="sign-in"),
    path("sign-in/<str:token>/", sign_in.sign_in_by_link, name="sign-in-link"),
    path("sign-out/", sign_in.sign_out, name="sign-out"),
    path("console/api/snapshot", live.snapshot, name="snapshot"),
    path("console/api/charts", live.charts, name="charts"),
    path("console/api/forecast-charts", forecast.charts, name="forecast-charts"),
    path("console/api/length-charts", lengths.charts, name="length-charts"),
    path("console/api/scaling-charts", scaling.charts, name="scaling-charts"),
]
# Channels calls what stands here as an ASGI application; to Django's types it is no view.
websocket_urlpatterns: list[Any] = [re_path(r"^ws/live/$", cast(Any, live_connection))]
