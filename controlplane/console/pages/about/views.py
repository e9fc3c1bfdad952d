"""About: the state of Pilothouse itself, so that its operators can watch the watcher."""

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane import __version__
from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.live.feed import feed
from controlplane.console.live.state import SOURCE_TEXT, Source
from controlplane.fleet.models import InstanceCommand

PACKAGES = ("django", "channels", "celery", "uvicorn", "aiohttp", "redis", "numpy", "numba", "plotly")
TIMEOUT_S = 1.0


def package_versions() -> list[tuple[str, str]]:
    versions = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            versions.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return versions


def database() -> dict[str, Any]:
    """Vendor and version of the database, and how long it takes to answer."""
    began = time.perf_counter()
    query = "SELECT sqlite_version()" if connection.vendor == "sqlite" else "SHOW server_version"
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            number = cursor.fetchone()[0]
    except DatabaseError as error:
        return {"ok": False, "error": str(error).splitlines()[0]}
    return {
        "ok": True,
        "name": {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(connection.vendor, connection.vendor),
        "version": number,
        "where": connection.settings_dict["HOST"] or "this machine",
        "answer_ms": (time.perf_counter() - began) * 1000,
    }


def broker() -> dict[str, Any]:
    """Redis as broker and bus: its version, how long it takes to answer, and how many tasks wait in it."""
    parts = urlsplit(settings.REDIS_URL)
    where = f"{parts.hostname}:{parts.port or 6379}{parts.path}"  # never the password
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S
        ) as client:
            began = time.perf_counter()
            client.ping()
            answer_ms = (time.perf_counter() - began) * 1000
            info = client.info("server")
            queued = client.llen(settings.CELERY_TASK_DEFAULT_QUEUE)
    except (redis.RedisError, OSError) as error:
        return {"ok": False, "where": where, "error": str(error)}
    return {
        "ok": True,
        "where": where,
        "version": info.get("valkey_version") or info.get("redis_version", ""),
        "name": "Valkey" if "valkey_version" in info else "Redis",
        "answer_ms": answer_ms,
        "queued": queued,
    }


def poll_lag_s(heartbeats: list[float | None], ts: float | None) -> float | None:
    """Age of the oldest heartbeat among instances that have answered, when the summary was made."""
    known = [at for at in heartbeats if at is not None]
    return max(0.0, ts - min(known)) if known and ts is not None else None


@require_safe
@fleet_role(Role.VIEWER)
def about(request: HttpRequest) -> HttpResponse:
    state = feed.state()
    reachable = [row["heartbeat_at"] for row in state.tables["instances"] if row["reachable"]]
    waiting = InstanceCommand.objects.open().count()
    context = {
        "pilothouse": __version__,
        "packages": package_versions(),
        "database": database(),
        "broker": broker(),
        "live": state,
        "source_ok": state.source == Source.LIVE,
        "source_text": SOURCE_TEXT.get(state.source, "live"),
        "summary_age_s": time.time() - state.ts if state.ts is not None else None,
        "gateway_up_s": time.time() - state.started_at if state.started_at else None,
        "samples": len(state.history),
        "clients": feed.connections,
        "poll_lag_s": poll_lag_s(reachable, state.ts),
        "commands_waiting": waiting,
        "settings_shown": [
            ("Ledger kept", f"{settings.LEDGER_KEEP_DAYS} days", "PILOTHOUSE_LEDGER_KEEP_DAYS"),
            ("Time zone of pages", settings.TIME_ZONE, "PILOTHOUSE_TIME_ZONE"),
        ],
    }
    return render(request, "console/about/about.html", context)
