"""Scripted stand-in for one vLLM server; it records its requests."""

import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web

ENGINE_DEAD = {  # vLLM 0.32's EngineDeadError, in a body or in a stream
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


@dataclass
class Script:
    """Script of the backend's answers; tests change it at run time."""

    tokens: int = 3
    token_s: float = 0.0
    first_token_s: float = 0.0
    lingers_s: float = 0.0  # between a stream's last event and its end
    status: int = 200
    die: str = ""
    """"at_once": close without a byte; "midway": after the first token; "last": after the last event, before the
    answer's end; "engine": with vLLM's engine error. In any case, a body with "kill" ends the "server" or the
    "engine".
    """
    choices: int = 1
    metrics: bool = True
    metrics_status: int = 200
    metrics_s: float = 0.0  # delay of /metrics
    health: bool = True  # /health is answered; with *metrics* alone, as vLLM's are by one loop
    retry_after: str = ""  # the header of an answer other than 200
    running: int | None = None  # reported by /metrics, independent of what runs
    models: tuple[str, ...] | None = ("m",)  # reported by /v1/models; None: no such page, nor /version
    kv_cache_tokens: int = 100_000
    cached_tokens: int | None = None  # of each prompt, as its usage says; None: it does not
    lora_status: int = 200  # of its answer to a call that loads an adapter
    lora_s: float = 0.0  # duration of one
    hold: asyncio.Event | None = None  # answers wait for it
    plays: list[bytes] = field(default_factory=list)  # instead of any answer: raw pieces, then the end
    piece_s: float = 0.0


@dataclass
class Backend:
    name: str
    script: Script = field(default_factory=Script)
    bodies: list[dict] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list = field(default_factory=list)
    running: int = 0
    prefilled: int = 0  # prompt tokens since its start, as vLLM counts them
    generated: int = 0  # output tokens, while answers are made
    aborted: int = 0
    killed: bool = False  # engine is dead
    adapters: list[str] = field(default_factory=list)  # loaded ones
    lora_calls: list[str] = field(default_factory=list)  # "+name" and "-name", in order
    ended: asyncio.Task | None = None
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_post("/v1/audio/{call}", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.script.metrics and self.script.health else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"}) if self.script.models is not None else web.Response(status=404)

    async def _models(self, request: web.Request) -> web.Response:
        if self.script.models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.script.models]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(self.script.lora_s)
        if self.script.lora_status != 200:
            error = {"message": "No adapter found", "type": "NotFoundError", "param": None, "code": 404}
            return web.json_response({"error": error}, status=self.script.lora_status)
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters.append(body["lora_name"])
        self.lora_calls.append(f"+{body['lora_name']}")
        return web.Response(text=f"loaded from {body['lora_path']}")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.lora_calls.append(f"-{name}")
        self.adapters.remove(name)
        return web.Response(text="unloaded")

    async def _metrics(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.script.metrics_s)
        if self.script.metrics_status != 200:
            return web.Response(status=self.script.metrics_status)
        if not self.script.metrics:
            request.transport.abort()
        labels = f'engine="0",model_name="{(self.script.models or ("m",))[0]}"'
        running = self.running if self.script.running is None else self.script.running
        text = (
            f"vllm:num_requests_running{{{labels}}} {running}.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
            f"vllm:prompt_tokens_total{{{labels}}} {self.prefilled}.0\n"
            f"vllm:generation_tokens_total{{{labels}}} {self.generated}.0\n"
            f'vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{self.script.kv_cache_tokens}",'
            f'num_gpu_blocks="{self.script.kv_cache_tokens // 16}"}} 1.0\n'
        )
        return web.Response(text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if request.content_type == "application/json" else {}
        self.raw.append(raw)
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        self.running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        script = self.script
        if body.get("kill") == "server":
            self.ended = asyncio.create_task(self.stop())
            await asyncio.Event().wait()
        if body.get("kill") == "engine":
            self.killed = True
        if self.killed:
            return web.json_response({"error": ENGINE_DEAD}, status=500)
        if script.die == "at_once":
            request.transport.abort()
            return web.Response()
        if script.hold:
            await script.hold.wait()
        if script.plays:
            for piece in script.plays:
                request.transport.write(piece)
                await asyncio.sleep(script.piece_s)
            request.transport.close()
            return web.Response()
        if script.die == "engine" and not body.get("stream"):
            return web.json_response({"error": ENGINE_DEAD}, status=500)
        if script.status != 200:
            error = {"message": "scripted", "type": "BadRequestError", "param": None, "code": script.status}
            headers = {"Retry-After": script.retry_after} if script.retry_after else {}
            return web.json_response({"error": error}, status=script.status, headers=headers)
        if request.path.endswith("/responses"):
            return await self._respond(request)
        if body["model"] not in {*(script.models or ("m",)), *self.adapters}:
            error = {"message": "The model does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        if not isinstance(body.get("max_tokens") or 1, int):
            error = {"message": "Not a number.", "type": "BadRequestError", "param": "max_tokens", "code": 400}
            return web.json_response({"error": error}, status=400)
        chat = request.path.endswith("chat/completions")
        tokens = min(script.tokens, body.get("max_tokens") or script.tokens)
        usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}
        if script.cached_tokens is not None:  # with --enable-prompt-tokens-details
            usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
        if not body.get("stream"):
            await asyncio.sleep(script.first_token_s + tokens * script.token_s)
            return web.json_response({"id": "x", "object": "o", "model": body["model"], "choices": [], "usage": usage})

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(script.first_token_s)

        async def event(data: dict) -> None:
            await response.write(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")

        async def engine_dies() -> web.StreamResponse:
            await event({"error": ENGINE_DEAD})
            await response.write(b"data: [DONE]\n\n")
            return response

        asked_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        if script.die == "engine" and script.tokens == 0:
            return await engine_dies()
        base = {"id": "chatcmpl-" + request.headers["X-Request-Id"], "object": "chunk", "model": body["model"]}
        if chat:
            await event(base | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(tokens):
            if script.die == "midway" and index == 1:
                request.transport.abort()
                return response
            if script.die == "engine" and index == 1:
                return await engine_dies()
            piece = {"delta": {"content": f"t{index} "}} if chat else {"text": f"t{index} "}
            for choice in range(script.choices):
                await event(base | {"choices": [{"index": choice, **piece, "finish_reason": None}]})
            await asyncio.sleep(script.token_s)
        if asked_usage:
            await event(base | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(script.lingers_s)
        if script.die == "last":
            request.transport.abort()
        return response

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        """Stream a Responses answer; "opened" as `die`: the server is lost before its engine began."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def event(kind: str, **fields: object) -> None:
            data = json.dumps({**fields, "type": kind}, separators=(",", ":"))
            await response.write(f"event: {kind}\ndata: {data}\n\n".encode())

        await event("response.created", response={"id": "r", "usage": None})
        await event("response.in_progress", response={"id": "r", "usage": None})
        if self.script.die == "opened":
            request.transport.abort()
            return response
        await asyncio.sleep(self.script.first_token_s)
        await event("response.output_item.added", item={"id": "i"})
        for index in range(self.script.tokens):
            await event("response.output_text.delta", delta=f"t{index} ")
        usage = {"input_tokens": 7, "output_tokens": self.script.tokens, "total_tokens": 7 + self.script.tokens}
        await event("response.completed", response={"id": "r", "usage": usage})
        return response
