"""Paths of the console: one line for each page, whose own paths are in its folder, and those of the live connection."""

from typing import Any, cast

from django.urls import include, path, re_path

from controlplane.console.live.consumers import live as live_connection
from controlplane.console.live.views import snapshot

PAGES = (
    "overview",
    "instances",
    "requests",
    "forecast",
    "scaling",
    "plans",
    "lengths",
    "keys",
    "system",
    "events",
    "about",
    "sign_in",
)

app_name = "console"
urlpatterns = [
    *(path("", include(f"controlplane.console.pages.{page}.urls")) for page in PAGES),
    path("console/api/snapshot", snapshot, name="snapshot"),
]
# Channels calls what stands here as an ASGI application; to Django's types it is no view.
websocket_urlpatterns: list[Any] = [re_path(r"^ws/live/$", cast(Any, live_connection))]
