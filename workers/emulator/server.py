"""Many emulated servers behind one port, each under its own path, and the admin surface that makes and breaks them.

    http://127.0.0.1:8100/<name>/v1/chat/completions      as of a vLLM server at http://127.0.0.1:8100/<name>
    http://127.0.0.1:8100/emulator/instances              admin, from this machine only

A connection to a server that is loading, crashed or absent is closed without an answer: a real server's
port would refuse it.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial
from typing import get_args

import orjson
from aiohttp import web

from workers.emulator import service
from workers.emulator.answers import CutError
from workers.emulator.calls import ApiError, Surface
from workers.emulator.instance import EmulatedInstance, Fault, FaultKind
from workers.emulator.spec import InstanceSpec, SpecError, check_name, read_spec
from workers.vllm.tasks import CHAT_BATCH, CLASSIFY, COHERE_EMBED, EMBEDDINGS, PATHS, POOLING, SPEECH

MAX_BODY_BYTES = 64 * 2**20
FAULTS = set(get_args(FaultKind))
Service = Callable[[EmulatedInstance, web.Request], Awaitable[web.StreamResponse]]

SURFACES: dict[str, Surface] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "response",
    "/v1/messages": "message",
}
ROUTES: tuple[tuple[str, str, Service], ...] = (
    ("GET", "/health", service.health),
    ("GET", "/ping", service.health),
    ("POST", "/ping", service.health),
    ("GET", "/version", service.version),
    ("GET", "/metrics", service.metrics),
    ("GET", "/v1/models", service.models),
    *(("POST", path, partial(service.generate, surface=surface)) for path, surface in SURFACES.items()),
    *(("POST", f"{path}/render", partial(service.render, surface=surface)) for path, surface in SURFACES.items()),
    ("POST", CHAT_BATCH, service.chat_batch),
    ("POST", "/v1/messages/count_tokens", service.count_tokens),
    *(("POST", path, service.speech) for path in SPEECH),
    ("POST", "/tokenize", service.tokenize),
    ("POST", "/detokenize", service.detokenize),
    ("GET", "/kv_event_sources", service.kv_event_sources),
    ("GET", "/openapi.json", service.openapi),
)
POOLING_ROUTES = {
    EMBEDDINGS: (EMBEDDINGS,),
    COHERE_EMBED: (COHERE_EMBED,),
    POOLING: (POOLING,),
    CLASSIFY: (CLASSIFY,),
    "/rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "/score": ("/score", "/v1/score"),
}
"""Paths of each pooling call."""
DEV_ROUTES: tuple[tuple[str, str, Service], ...] = (
    ("POST", "/sleep", service.sleep),
    ("POST", "/wake_up", service.wake_up),
    ("GET", "/is_sleeping", service.is_sleeping),
    ("POST", "/collective_rpc", service.collective_rpc),
    ("POST", "/reset_prefix_cache", service.reset_prefix_cache),
)
LORA_ROUTES: tuple[tuple[str, str, Service], ...] = (
    ("POST", "/v1/load_lora_adapter", service.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", service.unload_lora_adapter),
)


BY_TASK = frozenset().union(*PATHS.values())


class Fleet:
    """The emulated servers of this process, by name."""

    def __init__(self, seed: int = 0) -> None:
        self.instances: dict[str, EmulatedInstance] = {}
        self._seed = seed

    def put(self, name: str, spec: InstanceSpec) -> bool:
        """Create a server *name* with *spec*; return True if it was created, or restarted after a crash.

        Raises SpecError if a living one of that name has another specification.
        """
        present = self.instances.get(name)
        if present is not None and present.state != "crashed":
            if present.spec == spec:
                return False
            raise SpecError(f"{name} is there already, with another specification")
        instance = EmulatedInstance(name, spec, self._seed)
        if present is not None:
            present.set_fault(Fault("crash"))  # cancels a recovery that would bring the old one back
        self.instances[name] = instance
        instance.start()
        return True

    async def remove(self, name: str) -> bool:
        instance = self.instances.pop(name, None)
        if instance is None:
            return False
        await instance.close()
        return True

    async def close(self) -> None:
        await asyncio.gather(*(self.remove(name) for name in list(self.instances)))


FLEET = web.AppKey("fleet", Fleet)
SINGLE = web.AppKey("single", str)


def make_app(fleet: Fleet, single: str | None = None) -> web.Application:
    """Return the application; with *single*, the server of that name answers at the root instead of under its name."""
    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
    app[FLEET] = fleet
    app[SINGLE] = single or ""
    app.router.add_get("/emulator/instances", _admin(_list))
    app.router.add_get("/emulator/instances/{name}", _admin(_get))
    app.router.add_put("/emulator/instances/{name}", _admin(_put))
    app.router.add_delete("/emulator/instances/{name}", _admin(_delete))
    app.router.add_post("/emulator/instances/{name}/fault", _admin(_fault))
    prefix = "" if single else "/{name}"
    for method, path, handler in ROUTES:
        app.router.add_route(method, prefix + path, _serve(handler, single, call=path), expect_handler=None)
    for call, paths in POOLING_ROUTES.items():
        for path in paths:
            pooled = partial(service.pooled, path=call)
            app.router.add_post(prefix + path, _serve(pooled, single, call=call), expect_handler=None)
    for method, path, handler in DEV_ROUTES:
        app.router.add_route(method, prefix + path, _serve(handler, single, "dev_mode"))
    for method, path, handler in LORA_ROUTES:
        app.router.add_route(method, prefix + path, _serve(handler, single, "enable_lora"))

    async def close_fleet(app: web.Application) -> None:
        await fleet.close()

    app.on_shutdown.append(close_fleet)
    return app


async def run(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Listen; the caller calls `cleanup` on the result. Raises OSError if the port is taken."""
    # Cancellation is how a disconnect reaches the engine. Access logs would cost more than the answers.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _serve(handler: Service, single: str | None, option: str | None = None, call: str = "") -> Handler:
    """Return a route of an emulated server; with *option*, one that exists only if its specification says so.

    *call*: a path of which its task decides whether it exists.
    """

    async def serve(request: web.Request) -> web.StreamResponse:
        instance = request.app[FLEET].instances.get(single or request.match_info["name"])
        if instance is None or not instance.listening:
            raise CutError
        await instance.responsive()
        if option is not None and not getattr(instance.spec, option):
            raise web.HTTPNotFound
        if call in BY_TASK and call not in PATHS[instance.spec.task]:
            raise web.HTTPNotFound
        response = await handler(instance, request)
        if not instance.listening:
            raise CutError
        await instance.responsive()
        return response

    return serve


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the words of vLLM's framework, and cut connections."""
    try:
        return await handler(request)
    except ApiError as error:
        return service.error_response(error)
    except (CutError, ConnectionResetError):  # the server died, or the caller left at this very moment
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)  # goes nowhere
    except web.HTTPNotFound:
        return service.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed as error:
        allow = {"Allow": ", ".join(sorted(error.allowed_methods))}
        return service.json_response({"detail": "Method Not Allowed"}, 405, allow)


def _admin(handler: Handler) -> Handler:
    async def admin(request: web.Request) -> web.StreamResponse:
        try:
            local = ipaddress.ip_address(request.remote or "").is_loopback
        except ValueError:
            local = False
        if not local:
            return service.json_response({"error": "The admin surface answers to this machine only."}, status=403)
        return await handler(request)

    return admin


def _url(request: web.Request, name: str) -> str:
    path = "" if name == request.app[SINGLE] else f"/{name}"
    return f"{request.scheme}://{request.host}{path}"


def _described(request: web.Request, instance: EmulatedInstance) -> dict[str, object]:
    metrics = instance.metrics
    return {
        "name": instance.name,
        "url": _url(request, instance.name),
        "model": instance.spec.model,
        "state": instance.state,
        "running": metrics.running,
        "waiting": metrics.waiting,
        "kv_usage": metrics.kv_usage,
        "fault": {"kind": instance.fault.kind, "factor": instance.fault.factor, "ratio": instance.fault.ratio},
        "spec": instance.spec.model_dump(),
    }


async def _list(request: web.Request) -> web.Response:
    fleet = request.app[FLEET]
    return service.json_response(
        {"instances": [_described(request, instance) for instance in fleet.instances.values()]}
    )


def _named(request: web.Request) -> EmulatedInstance:
    instance = request.app[FLEET].instances.get(request.match_info["name"])
    if instance is None:
        raise web.HTTPNotFound
    return instance


async def _get(request: web.Request) -> web.Response:
    return service.json_response(_described(request, _named(request)))


async def _put(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    try:
        check_name(name)
        spec = read_spec(orjson.loads(await request.read()))
    except (SpecError, orjson.JSONDecodeError) as error:
        return service.json_response({"error": str(error)}, status=400)
    try:
        created = request.app[FLEET].put(name, spec)
    except SpecError as error:
        return service.json_response({"error": str(error)}, status=409)
    return service.json_response({"name": name, "url": _url(request, name), "created": created})


async def _delete(request: web.Request) -> web.Response:
    if not await request.app[FLEET].remove(request.match_info["name"]):
        raise web.HTTPNotFound
    return web.Response(status=204)


async def _fault(request: web.Request) -> web.Response:
    instance = _named(request)
    try:
        body = orjson.loads(await request.read())
        fault, for_s = _read_fault(body)
    except (ValueError, TypeError, AttributeError) as error:
        return service.json_response({"error": f"a wrong fault: {error}"}, status=400)
    instance.set_fault(fault, for_s)
    return service.json_response(_described(request, instance))


def _read_fault(body: dict[str, object]) -> tuple[Fault, float | None]:
    """Return the fault and its duration in seconds. Raises ValueError, TypeError or AttributeError."""
    kind = body.get("kind")
    if kind not in FAULTS:
        raise ValueError(f"kind must be one of {', '.join(sorted(FAULTS))}")
    factor = float(str(body.get("factor", 3.0)))
    ratio = float(str(body.get("ratio", 1.0)))
    for_s = body.get("for_s")
    if factor <= 0 or not 0 <= ratio <= 1:
        raise ValueError("factor must be above 0 and ratio between 0 and 1")
    return (
        Fault(
            str(kind),  # type: ignore[arg-type]
            factor if kind in ("slow", "slow_metrics") else 1.0,
            ratio if kind in ("errors", "garbled") else 0.0,
        ),
        None if for_s is None else float(str(for_s)),
    )
