"""The ASGI application: each protocol and path is routed to the thinnest stack that can serve it.

- `/healthz` …      operations: answers from memory, never waits for the database
- `/v1/…`           the gateway: tenants' data path, without Django middleware; other paths that clients of OpenAI and vLLM
  request, and any request with a key, get its errors, in JSON
- `/v1/files`, `/v1/batches`, `/v1/runs` served by Django, off the data path
- `/static/…`       files, served by servestatic
- websockets        Channels, behind origin check and session
- everything else   Django: console, admin, operator API
"""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.utils import timezone

django_application = get_asgi_application()  # sets Django up: modules that need models are imported below

from servestatic import ServeStaticASGI

from controlplane import urls  # noqa: F401 (else the first page's request imports all pages on the event loop, for seconds)
from controlplane.alerts import watch as alert_watch
from controlplane.alerts.problems import Problem, find, read_known
from controlplane.alerts.watch import AlertWatch
from controlplane.applications import warming
from controlplane.applications.api import MAX_BODY_BYTES
from controlplane.applications.api import PATH as RUNS_PATH
from controlplane.applications.feeding import GraphFeeder
from controlplane.applications.reporting import deliver_reports
from controlplane.background import spawn
from controlplane.batches.feeder import TICK_S, Feeder
from controlplane.batches.services import MAX_FILE_BYTES
from controlplane.console.live.feed import feed
from controlplane.console.urls import websocket_urlpatterns
from controlplane.dispatch.lease import BATCHES
from controlplane.dispatch.process import Dispatching
from controlplane.gateway.admission.validation import PATH_KINDS
from controlplane.gateway.errors import too_large
from controlplane.gateway.process import Gateway, end
from controlplane.gateway.serving.application import PATHS_NOT_SERVED
from controlplane.listening import Drain
from controlplane.operations import Application, Operations, Receive, Scope, Send
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.usage.run_terms import RunTermsReader

websockets = cast(Application, AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))))
pages = cast(Application, django_application)
static_files = ServeStaticASGI(None, root=str(settings.STATIC_ROOT), prefix="static/")


def create_application(gateway: Gateway) -> Application:
    """Build the ASGI application around one gateway."""
    operations = Operations(gateway)
    if gateway.dispatching is not None:
        gateway.dispatching.allowances.runs.load = RunTermsReader()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                path = scope["path"]
                if path not in PATH_KINDS and ("//" in path or path[-1:] == "/"):
                    path = scope["path"] = without_extra_slashes(path)
                if path in PATH_KINDS:  # most requests
                    await gateway.http(scope, receive, send)
                elif path in operations.paths:
                    await operations(scope, receive, send)
                elif path.startswith(("/v1/files", "/v1/batches")):
                    await _upload(scope, receive, send, MAX_FILE_BYTES + FORM_BYTES)
                elif path == RUNS_PATH or path.startswith(f"{RUNS_PATH}/"):
                    await _upload(scope, receive, reported(send, gateway), MAX_BODY_BYTES)
                elif path.startswith("/v1/") or path == "/v1" or _of_api_client(scope, path):
                    await gateway.http(scope, receive, send)
                elif path.startswith("/static/"):
                    await static_files(scope, receive, send)
                else:
                    await pages(scope, receive, send)
            case "websocket":
                await websockets(scope, receive, send)
            case "lifespan":
                await lifespan(gateway, scope, receive, send)

    return application


API_PATH = re.compile(r"/+(v\d+)(?:/+(.*?))?/*")
RUN_PATH = re.compile(rf"{RUNS_PATH}/+(.+)")


def without_extra_slashes(path: str) -> str:
    """Return a path of the gateway as clients mean it whose base address ends in a slash; any other path as it is.

    The name of a run may hold such slashes.
    """
    if (parts := API_PATH.fullmatch(path)) is None:
        plain = f"/{path.strip('/')}"
        return plain if plain in PATH_KINDS else path
    version, rest = parts.groups()
    plain = f"/{version}/{rest}" if rest else f"/{version}"
    if run := RUN_PATH.fullmatch(plain):
        return f"{RUNS_PATH}/{run.group(1)}"
    return re.sub("//+", "/", plain)


def reported(send: Send, gateway: Gateway) -> Send:
    """Return *send* for an answer to a report about a run: the dispatcher hears of it before the tenant does."""

    async def send_answer(message: Any) -> None:
        deliver_reports(gateway.dispatchers.send)
        await send(message)

    return send_answer


FORM_BYTES = 64 * 1024
"""Of an upload, alongside the file."""


async def _upload(scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
    """Let Django answer, unless the body is larger than *most_bytes*: it would store all of it first."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if int(announced) > most_bytes:
        error = too_large(f"A body has at most {most_bytes:,} bytes here.", ((b"connection", b"close"),))
        await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
        await send({"type": "http.response.body", "body": error.body()})
        return
    size = 0

    async def receive_some() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        return message if size <= most_bytes else {"type": "http.disconnect"}

    await pages(scope, receive_some, send)


def _of_api_client(scope: Scope, path: str) -> bool:
    """Return whether a request outside `/v1` and `/api` comes from an API client: browsers send no key (but may send a
    proxy's password)."""
    if path.startswith("/api/"):
        return False
    keys = (value for name, value in scope["headers"] if name == b"authorization")
    return (
        path in PATH_KINDS
        or path == "/load"
        or path in PATHS_NOT_SERVED
        or any(value[:7].lower() == b"bearer " for value in keys)
    )


async def lifespan(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    """Start the gateway before the first request; on shutdown let it finish its streams and write its ledger."""
    feeding: list[asyncio.Future[Any]] = []
    drain = Drain()
    scope.get("state", {})[Drain.STATE] = drain  # its connections look there
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                await gateway.start()
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": f"gateway: {error}"})
                raise
            jobs = {"batches": feeder_of(gateway).run()}
            if gateway.dispatching is not None:
                jobs["applications"] = follow_applications(gateway, gateway.dispatching)
                jobs["alerts"] = alert_watch_of(gateway).run()
            feeding += [spawn(work, name) for name, work in jobs.items()]
            on_stop(gateway.step_down, drain)
            await send({"type": "lifespan.startup.complete"})
        else:
            await end(feeding)
            await gateway.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return


def on_stop(step_down: Callable[[], None], drain: Drain) -> None:
    """Have the event loop call *step_down* when the process is to stop: the server says so only after its streams ended.

    SIGTERM begins *drain*, and reaches the server after it; SIGINT, or another SIGTERM, reaches it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    async def drained(stop: Callable[[], object]) -> None:
        try:
            await drain.run(settings.DRAIN_S)
        finally:
            stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, before: Any = before) -> None:
            stop = partial(before, number, frame) if callable(before) else int
            loop.call_soon_threadsafe(step_down)
            if number == signal.SIGTERM and not drain.began:
                drain.began = True
                loop.call_soon_threadsafe(lambda: spawn(drained(stop), "drain"))
            else:
                stop()

        signal.signal(number, handle)


def feeder_of(gateway: Gateway) -> Feeder:
    """What answers batches by *gateway*."""
    return Feeder(
        gateway.http.completions,
        ledger=gateway.ledger,
        owns=partial(gateway.lease.holds, BATCHES),
        job=gateway.jobs.add("feed-batches", TICK_S, "database"),
    )


async def follow_applications(gateway: Gateway, dispatching: Dispatching) -> None:
    """Have other platforms warm what runs will need, and give the dispatcher the demand graphs of applications and their
    runs in progress."""
    job = gateway.jobs.add("applications", warming.PERIOD_S, "database")
    dispatcher = dispatching.dispatcher
    units = warming.UnitWarming(dispatcher.prewarming, gateway.owns)
    graphs = GraphFeeder(dispatcher.runs, lambda: dispatching.serving if dispatching.owns() else ())
    try:
        while True:
            with job:
                await units.tick()
                await graphs.feed(gateway.clock())
            await asyncio.sleep(warming.PERIOD_S)
    finally:
        units.stop()


def alert_watch_of(gateway: Gateway) -> AlertWatch:
    """What judges the alert rules by the live numbers of this process."""

    def found() -> tuple[Problem, ...]:
        feed.start()  # where no page did
        return find(feed.latest().tables, read_known(timezone.now()))

    return AlertWatch(gateway.jobs.add("alerts", alert_watch.LOOK_S, "database"), found, gateway.owns)


application = create_application(Gateway(ScalingLoop))
