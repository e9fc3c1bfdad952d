"""vLLM's HTTP surface on top of `EmulatedInstance`."""

import asyncio
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, cast, get_args

import orjson
from aiohttp import web

from workers.emulator import calls, pooling, text
from workers.emulator.answers import Answer, CutError, StreamedAnswer
from workers.emulator.calls import ApiError, CheckedCall, Prompt, Surface, bad, decoded, malformed
from workers.emulator.instance import EmulatedInstance, SleepMode
from workers.emulator.shapes import SHAPES
from workers.vllm.sound import seconds_of, sound_tokens
from workers.vllm.tasks import PATHS

VERSION: Final = "0.32.0"
JSON: Final = "application/json"
EXPOSITION: Final = "text/plain; version=1.0.0; charset=utf-8"
PREFIXES: Final = {"completion": "cmpl", "response": "resp", "speech": "transcribe"}
GARBAGE: Final = b"\x16\x03\x01\x02\x00\x01 no answer at all\r\n\r\n"
SOUND_ID: Final = 50_000


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type=JSON, headers=headers)


def error_response(error: ApiError) -> web.Response:
    return web.Response(body=error.body(), status=error.status, content_type=JSON)


async def health(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return web.Response()


async def version(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"version": VERSION})


async def metrics(instance: EmulatedInstance, request: web.Request) -> web.Response:
    if instance.fault.kind == "slow_metrics":
        await asyncio.sleep(instance.fault.factor)
    return web.Response(body=instance.metrics.render(), headers={"Content-Type": EXPOSITION})


async def models(instance: EmulatedInstance, request: web.Request) -> web.Response:
    spec = instance.spec
    cards = [_card(instance, spec.model, spec.model, None, spec.max_model_len)]
    cards += [_card(instance, name, path, spec.model, None) for name, path in instance.adapters.paths.items()]
    return json_response({"object": "list", "data": cards})


PERMISSION: Final = {
    "id": "modelperm-emulated", "object": "model_permission", "created": 0, "allow_create_engine": False,
    "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False, "allow_view": True,
    "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip


def _card(
    instance: EmulatedInstance, name: str, root: str, parent: str | None, max_model_len: int | None
) -> dict[str, object]:
    card = {"id": name, "object": "model", "created": instance.created_s, "owned_by": "vllm", "root": root}
    return card | {"parent": parent, "max_model_len": max_model_len, "permission": [PERMISSION]}


async def generate(instance: EmulatedInstance, request: web.Request, surface: Surface) -> web.StreamResponse:
    """Answer a call of *surface*. When the caller disconnects, aiohttp cancels this and the engine drops the request."""
    body = await _body(request)
    _fail_at_times(instance, request)
    try:
        asked = _checked(instance, body, surface)
    except ApiError as error:
        if surface != "message":
            raise
        shown = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
        return json_response(shown, error.status)
    return await _answered(instance, request, asked)


async def chat_batch(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    """Answer several conversations at once: a choice for each."""
    body = await _body(request)
    _fail_at_times(instance, request)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise malformed("Field required", "body.messages")
    if body.get("n") not in (None, 1):
        raise bad("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n")
    each = [_checked(instance, body | {"messages": one, "stream": False}, "chat") for one in given]
    prompts, most = tuple(one.prompts[0] for one in each), tuple(one.max_tokens[0] for one in each)
    return await _answered(instance, request, replace(each[0], prompts=prompts, max_tokens=most))


async def speech(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    """Transcribe or translate a sound: the engine gets it as one prompt of as many tokens as vLLM counts for it."""
    form = dict(await request.post())
    sound = form.pop("file", None)
    if not isinstance(sound, web.FileField):
        raise malformed("Field required", "body.file")
    _fail_at_times(instance, request)
    seconds = seconds_of(sound.file.read())
    body: dict[str, Any] = {"model": form.get("model"), "stream": form.get("stream") == "true", "seconds": seconds}
    body |= {name: form[name] for name in ("response_format", "language") if name in form}
    body["stream_options"] = {"include_usage": form.get("stream_include_usage") == "true"} if body["stream"] else None
    limit = int(str(form.get("max_completion_tokens") or calls.DEFAULT_TOKENS["speech"]))
    body["max_tokens"] = min(limit, instance.spec.max_model_len - 1)
    body["prompt"] = [SOUND_ID] * min(sound_tokens(seconds), instance.spec.max_model_len - body["max_tokens"])
    asked = _checked(instance, body, "completion")
    return await _answered(instance, request, replace(asked, surface="speech"))


async def _answered(instance: EmulatedInstance, request: web.Request, asked: CheckedCall) -> web.StreamResponse:
    given_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
    request_id = f"{PREFIXES.get(asked.surface, 'chatcmpl')}-{given_id}"
    model = asked.get("model", instance.spec.model)
    if asked.get("stream"):
        return await _streamed(instance, request, asked, request_id, model)
    answer = Answer(asked, request_id, model, int(time.time()))
    async with _computed(instance, answer):
        return json_response(SHAPES[asked.surface](answer).whole())


@asynccontextmanager
async def _computed(instance: EmulatedInstance, answer: Answer) -> AsyncIterator[None]:
    """Give *answer* to the engine and wait until it is complete. What the engine holds of it is freed at the end."""
    instance.submit(answer)
    try:
        await answer.done
        yield
    finally:
        instance.withdraw(answer)


async def _streamed(
    instance: EmulatedInstance,
    request: web.Request,
    asked: CheckedCall,
    request_id: str,
    model: str,
) -> web.StreamResponse:
    # vLLM sends the head of a stream at once, even while the request waits.
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    if request.transport is None:
        raise CutError
    stream = StreamedAnswer(asked, request_id, model, int(time.time()), request.transport)
    stream.shape = SHAPES[asked.surface](stream)
    async with _computed(instance, stream):
        await response.write_eof()
    return response


def _checked(instance: EmulatedInstance, body: dict[str, Any], surface: Surface) -> CheckedCall:
    _check_model(instance, body.get("model"))
    if body.get("background"):
        raise ApiError(400, "invalid_request_error", "This vLLM engine does not support `store=True`.", "background")
    if (before := body.get("previous_response_id")) is not None:  # by default vLLM stores none
        message = f"Response with id '{before}' not found."
        raise ApiError(404, "invalid_request_error", message, "response_id")
    asked = calls.read(surface, body, instance.spec)
    instance.admit(asked.n * len(asked.prompts))
    return asked


async def pooled(instance: EmulatedInstance, request: web.Request, path: str) -> web.Response:
    """Answer a pooling call to *path*, however it was written."""
    body = await _body(request)
    _fail_at_times(instance, request)
    _check_model(instance, body.get("model"))
    request_id = f"pool-{request.headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}"
    answer = pooling.PooledAnswer(path, body, request_id, int(time.time()), instance.spec)
    instance.admit(len(answer.asked.prompts))
    async with _computed(instance, answer):
        whole, content_type = answer.body()
    return web.Response(body=whole, content_type=content_type, headers=answer.headers)


async def render(instance: EmulatedInstance, request: web.Request, surface: Surface) -> web.Response:
    """Return what a call would give to the engine: its prompts as token ids."""
    if not instance.spec.enable_scale_out:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        raise ApiError(403, "PermissionDeniedError", message)
    body = await _body(request)
    _check_model(instance, body.get("model"))
    asked = calls.read(surface, body, instance.spec)
    rendered = [{"request_id": uuid.uuid4().hex[:16], "token_ids": prompt.token_ids} for prompt in asked.prompts]
    return json_response(rendered if surface == "completion" else rendered[0])


async def count_tokens(instance: EmulatedInstance, request: web.Request) -> web.Response:
    body = await _body(request)
    _check_model(instance, body.get("model"))
    return json_response({"input_tokens": calls.prompts_of("message", body)[0].tokens})


async def tokenize(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Answer as vLLM's tokenizer, which its engine has no part in."""
    body = await _body(request)
    _check_model(instance, body.get("model"))
    if body.get("messages") is None and not isinstance(body.get("prompt"), str):
        raise malformed("Field required", "body.prompt")
    prompt = Prompt(body["prompt"]) if body.get("messages") is None else calls.prompts_of("chat", body)[0]
    ids = prompt.token_ids
    return json_response({"count": len(ids), "max_model_len": instance.spec.max_model_len, "tokens": ids})


async def detokenize(instance: EmulatedInstance, request: web.Request) -> web.Response:
    body = await _body(request)
    _check_model(instance, body.get("model"))
    return json_response({"prompt": text.detokenize(body.get("tokens") or [])})


async def kv_event_sources(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response(instance.kv_events.sources() if instance.kv_events is not None else {})


async def openapi(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Return the paths that a server of its task answers, which is all that is read of vLLM's document."""
    paths: dict[str, object] = {path: {"post": {}} for path in PATHS[instance.spec.task]}
    paths |= {path: {"get": {}} for path in ("/health", "/metrics", "/v1/models", "/version")}
    return json_response({"openapi": "3.1.0", "info": {"title": "vLLM", "version": VERSION}, "paths": paths})


async def _body(request: web.Request) -> dict[str, Any]:
    if request.content_type != JSON:
        raise malformed("Unsupported Media Type: Only 'application/json' is allowed")
    return decoded(await request.read())


def _check_model(instance: EmulatedInstance, model: object) -> None:
    if model is not None and model != instance.spec.model and model not in instance.adapters.paths:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def _fail_at_times(instance: EmulatedInstance, request: web.Request) -> None:
    """Fail as the instance's fault wants."""
    fault = instance.fault
    if fault.kind == "errors" and random.random() < fault.ratio:
        raise ApiError(500, "InternalServerError", "Injected fault.")
    if fault.kind == "garbled" and random.random() < fault.ratio and request.transport is not None:
        request.transport.write(GARBAGE)
        raise CutError


# Control


async def sleep(instance: EmulatedInstance, request: web.Request) -> web.Response:
    level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
    if level not in ("0", "1", "2"):
        raise malformed("level should be 0, 1 or 2", "query.level")
    if mode not in get_args(SleepMode):
        raise malformed(f"mode should be one of {', '.join(get_args(SleepMode))}", "query.mode")
    await instance.sleep(int(level), cast(SleepMode, mode))
    return json_response({"status": "sleeping", "level": int(level)})


async def wake_up(instance: EmulatedInstance, request: web.Request) -> web.Response:
    tags = request.query.getall("tags", []) or None
    awake = await instance.wake_up(tags)
    return json_response({"status": "awake" if awake else "sleeping", "tags": tags})


async def is_sleeping(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"is_sleeping": instance.asleep})


async def collective_rpc(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Run `reload_weights`, the only method of vLLM's workers that is emulated."""
    method = decoded(await request.read() or b"{}").get("method")
    if method != "reload_weights":
        raise ApiError(500, "InternalServerError", f"'Worker' object has no attribute '{method}'")
    await instance.reload_weights()
    return json_response({"results": [None]})


async def reset_prefix_cache(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"success": instance.reset_prefix_cache()})


async def load_lora_adapter(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Load an adapter as vLLM does. Its content is not read, but an absolute path must exist."""
    body = decoded(await request.read() or b"{}")
    if "lora_name" not in body or "lora_path" not in body:
        raise malformed("Field required", "body.lora_name")
    name, path = str(body["lora_name"]), str(body["lora_path"])
    if not name or not path:
        raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
    if name == instance.spec.model:
        raise ApiError(400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model.")
    if name in instance.adapters.paths and not body.get("load_inplace"):
        raise ApiError(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
    if path.startswith("/") and not os.access(path, os.R_OK):
        raise ApiError(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
    instance.adapters.paths[name] = path
    await asyncio.sleep(instance.adapters.use(name))
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.", content_type=None)


async def unload_lora_adapter(instance: EmulatedInstance, request: web.Request) -> web.Response:
    name = str(decoded(await request.read() or b"{}").get("lora_name") or "")
    if not name:
        raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
    if not instance.adapters.unload(name):
        raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.", content_type=None)
