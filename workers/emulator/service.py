"""vLLM's HTTP surface on top of `EmulatedInstance`."""

import asyncio
import os
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import orjson
from aiohttp import web

from workers.emulator import text
from workers.emulator.answers import CutError, PlainAnswer, PlainResponse, StreamAnswer, StreamResponse
from workers.emulator.bodies import (
    AdapterBody,
    AdapterName,
    ApiError,
    Body,
    BodyKind,
    ChatBody,
    ResponseBody,
    RpcBody,
    as_items,
    decoded,
    entry,
    malformed,
    read_body,
    validated,
    wrong,
)
from workers.emulator.generation import Generation, Prompt, conversation, resolve
from workers.emulator.instance import EmulatedInstance, SleepMode
from workers.emulator.messages import CountBody, MessageBody, PlainMessage, StreamMessage, chat_of, error_body
from workers.emulator.pooling import IDS, DetokenizeBody, PooledAnswer, PoolingBody, TokenizeBody
from workers.emulator.pooling import resolve as resolve_pooling
from workers.emulator.speech import PlainSpeech, SpeechForm, StreamSpeech, hear
from workers.emulator.text import CHARACTERS_PER_TOKEN
from workers.vllm.tasks import INPUT_TOKENS, PATHS

VERSION = "0.32.0"
JSON = "application/json"
EXPOSITION = "text/plain; version=1.0.0; charset=utf-8"
PREFIXES = {"chat": "chatcmpl", "completion": "cmpl"}
NO_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable these "
    "features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)
GARBAGE = b"\x16\x03\x01\x02\x00\x01 no answer at all\r\n\r\n"
MOST_STORED = 1000
SLEEP_MODES = ("abort", "wait", "keep")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type=JSON, headers=headers)


def error_response(error: ApiError) -> web.Response:
    return web.Response(body=error.body(), status=error.status, content_type=JSON)


async def health(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return web.Response()


async def version(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"version": VERSION})


async def server_load(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"server_load": instance.server_load})


async def metrics(instance: EmulatedInstance, request: web.Request) -> web.Response:
    if instance.fault.kind == "slow_metrics":
        await asyncio.sleep(instance.fault.factor)
    return web.Response(body=instance.metrics.render(), headers={"Content-Type": EXPOSITION})


async def models(instance: EmulatedInstance, request: web.Request) -> web.Response:
    spec = instance.spec
    cards = [_card(instance, spec.model, spec.model, None, spec.max_model_len)]
    cards += [_card(instance, name, path, spec.model, None) for name, path in instance.adapters.paths.items()]
    return json_response({"object": "list", "data": cards})


def _card(
    instance: EmulatedInstance, name: str, root: str, parent: str | None, max_model_len: int | None
) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{_random_id()}",
        "object": "model_permission",
        "created": instance.created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": instance.created_s,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


async def completions(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    return await _generate(instance, request, "completion")


async def chat_completions(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    return await _generate(instance, request, "chat")


async def responses(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    return await _generate(instance, request, "response")


async def messages(instance: EmulatedInstance, request: web.Request) -> web.StreamResponse:
    return await _generate(instance, request, "message")


async def chat_batch(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Answer several conversations at once: a choice for each."""
    data = decoded(await _json_body(request))
    _fail_at_times(instance, request)
    conversations = data.get("messages")
    if not isinstance(conversations, list) or not conversations:
        raise malformed([entry("missing", "body.messages", "Field required", data)], "body.messages")
    bodies = [validated(ChatBody, data | {"messages": one, "stream": False}) for one in conversations]
    if bodies[0].n not in (None, 1):
        raise wrong("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n", bodies[0].n)
    model = bodies[0].model or instance.spec.model
    each = [_checked(instance, body, model) for body in bodies]
    generation = replace(
        each[0],
        prompts=tuple(one.prompts[0] for one in each),
        max_tokens=tuple(one.max_tokens[0] for one in each),
    )
    request_id = f"chatcmpl-{request.headers.get('X-Request-Id') or _random_id()}"
    return await _whole(instance, PlainAnswer(generation, request_id, model, int(time.time())))


async def _whole(
    instance: EmulatedInstance, answer: PlainAnswer, headers: Mapping[str, str] | None = None
) -> web.Response:
    instance.submit(answer)
    try:
        await answer.done
        body = answer.body()
    finally:
        instance.withdraw(answer)
    return web.Response(body=body, content_type=JSON, headers=headers)


async def render(instance: EmulatedInstance, request: web.Request, path: str) -> web.Response:
    """Return what a call would give to the engine: its prompts as token ids."""
    if not instance.spec.enable_scale_out:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        raise ApiError(403, "PermissionDeniedError", message)
    body: Body
    if path == "/v1/messages/render":
        body = chat_of(validated(MessageBody, decoded(await _json_body(request))))
    else:
        body = read_body(RENDERED[path], request.content_type, await request.read())
    _check_alias(instance, body.model)
    generation = resolve(body, instance.spec)
    rendered = [
        {
            "request_id": _random_id(),
            "token_ids": prompt.token_ids,
            "token_offsets": None,
            "features": None,
            "sampling_params": {"max_tokens": most, "temperature": body.temperature, "stop": generation.stop},
            "model": body.model or instance.spec.model,
            "stream": bool(body.stream),
            "priority": body.priority,
        }
        for prompt, most in zip(generation.prompts, generation.max_tokens, strict=True)
    ]
    return json_response(rendered if path == "/v1/completions/render" else rendered[0])


RENDERED: dict[str, BodyKind] = {
    "/v1/chat/completions/render": "chat",
    "/v1/completions/render": "completion",
    "/v1/responses/render": "response",
}


async def speech(instance: EmulatedInstance, request: web.Request, path: str) -> web.StreamResponse:
    """Transcribe or translate a sound."""
    form = dict(await request.post())
    sound = form.pop("file", None)
    if not isinstance(sound, web.FileField):
        raise malformed([entry("missing", "body.file", "Field required", None)], "body.file")
    fields = validated(SpeechForm, form)
    _fail_at_times(instance, request)
    model = fields.model or instance.spec.model
    _check_alias(instance, model)
    instance.admit(1)
    heard = hear(fields, sound.file.read(), path, instance.spec)
    request_id = f"{heard.task}-{request.headers.get('X-Request-Id') or _random_id()}"
    if not fields.stream:
        return await _whole(instance, PlainSpeech(heard, request_id, model, int(time.time())))
    return await _streamed(instance, request, StreamSpeech, heard, request_id, model, {})


async def count_tokens(instance: EmulatedInstance, request: web.Request) -> web.Response:
    body = validated(CountBody, decoded(await _json_body(request)))
    try:
        _check_alias(instance, body.model)
    except ApiError as error:
        return web.Response(body=error_body(error), status=error.status, content_type=JSON)
    tokens = conversation(chat_of(body).messages).tokens
    return json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


async def pooled(instance: EmulatedInstance, request: web.Request, path: str) -> web.StreamResponse:
    """Answer a pooling call to *path*, however it was written."""
    body = validated(PoolingBody, decoded(await _json_body(request)))
    _fail_at_times(instance, request)
    if body.model is not None and body.model != instance.spec.model:
        raise ApiError(404, "NotFoundError", f"The model `{body.model}` does not exist.")
    pooling = resolve_pooling(body, path, instance.spec)
    instance.admit(len(pooling.prompts))
    request_id = f"{IDS[path]}-{request.headers.get('X-Request-Id') or _random_id()}"
    answer = PooledAnswer(pooling, request_id, instance.spec.model, int(time.time()), instance.spec)
    instance.server_load += instance.spec.enable_server_load_tracking
    instance.submit(answer)
    try:
        await answer.done
        whole, content_type, headers = answer.body()
    finally:
        instance.withdraw(answer)
        instance.server_load -= instance.spec.enable_server_load_tracking
    return web.Response(body=whole, content_type=content_type, headers=headers)


async def tokenize(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Answer as vLLM's tokenizer, which its engine has no part in."""
    body = validated(TokenizeBody, decoded(await _json_body(request)))
    _check_alias(instance, body.model)
    if body.messages is not None:
        prompt = conversation(body.messages, body.tools or ())
    elif body.prompt is not None:
        prompt = Prompt(body.prompt)
    else:
        missing = [entry("missing", f"body.{name}", "Field required", {}) for name in ("prompt", "messages")]
        raise malformed(missing, "body.prompt")
    ids = prompt.token_ids
    strings = [prompt.text[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(prompt.text), CHARACTERS_PER_TOKEN)]
    answer = {"count": len(ids), "max_model_len": instance.spec.max_model_len, "tokens": ids}
    return json_response(answer | {"token_strs": strings if body.return_token_strs else None})


async def kv_event_sources(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response(instance.kv_events.sources() if instance.kv_events is not None else {})


async def detokenize(instance: EmulatedInstance, request: web.Request) -> web.Response:
    body = validated(DetokenizeBody, decoded(await _json_body(request)))
    _check_alias(instance, body.model)
    return json_response({"prompt": text.detokenize(body.tokens)})


async def openapi(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Return the paths that a server of its task answers, which is all that is read of vLLM's document."""
    paths: dict[str, object] = {path: {"post": {}} for path in PATHS[instance.spec.task] if path != INPUT_TOKENS}
    paths |= {path: {"get": {}} for path in ("/health", "/load", "/metrics", "/v1/models", "/version")}
    return json_response({"openapi": "3.1.0", "info": {"title": "vLLM", "version": VERSION}, "paths": paths})


async def _json_body(request: web.Request) -> bytes:
    if request.content_type != JSON:
        raise malformed(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    raw = await request.read()
    if not raw:
        raise malformed([entry("missing", "body", "Field required", None)], "body")
    return raw


def _check_alias(instance: EmulatedInstance, model: str | None) -> None:
    if model is not None and model != instance.spec.model and model not in instance.adapters.paths:
        message = f"The model `{model}` does not exist. Valid aliases: {instance.spec.model}."
        raise ApiError(404, "NotFoundError", message, "model")


def _fail_at_times(instance: EmulatedInstance, request: web.Request) -> None:
    """Fail as the instance's fault wants."""
    fault = instance.fault
    if fault.kind == "errors" and random.random() < fault.ratio:
        raise ApiError(500, "InternalServerError", "Injected fault.")
    if fault.kind == "garbled" and random.random() < fault.ratio and request.transport is not None:
        request.transport.write(GARBAGE)
        raise CutError


async def stored_response(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Return a stored response; by default vLLM stores none."""
    response = request.match_info["response"]
    if response not in instance.responses:
        raise _no_response(response)
    return web.Response(body=instance.responses[response], content_type=JSON)


async def cancel_response(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Refuse to cancel: none that is stored runs in the background."""
    response = request.match_info["response"]
    if response not in instance.responses:
        raise _no_response(response)
    message = "Cannot cancel a synchronous response."
    raise ApiError(400, "invalid_request_error", message, "response_id")


def _no_response(response_id: str) -> ApiError:
    return ApiError(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


Call = BodyKind | Literal["message"]
ANSWERS: dict[Call, tuple[type[PlainAnswer], type[StreamAnswer]]] = {
    "response": (PlainResponse, StreamResponse),
    "message": (PlainMessage, StreamMessage),
}


async def _generate(instance: EmulatedInstance, request: web.Request, kind: Call) -> web.StreamResponse:
    if not instance.spec.enable_server_load_tracking:
        return await _answer(instance, request, kind)
    instance.server_load += 1
    try:
        return await _answer(instance, request, kind)
    finally:
        instance.server_load -= 1


async def _answer(instance: EmulatedInstance, request: web.Request, kind: Call) -> web.StreamResponse:
    """Check a request in vLLM's order, hand it to the engine, and send its output.

    When the caller disconnects, aiohttp cancels this coroutine and the engine drops the request.
    """
    body: Body
    if kind == "message":
        body = chat_of(validated(MessageBody, decoded(await _json_body(request))))
    else:
        body = read_body(kind, request.content_type, await request.read())
    _fail_at_times(instance, request)
    model = body.model or instance.spec.model
    try:
        generation = _checked(instance, body, model)
    except ApiError as error:
        if kind != "message":
            raise
        return web.Response(body=error_body(error), status=error.status, content_type=JSON)
    given_id = request.headers.get("X-Request-Id") or _random_id()
    request_id = f"resp_{_random_id()}" if kind == "response" else f"{PREFIXES.get(kind, 'chatcmpl')}-{given_id}"
    headers = {}
    if instance.spec.enable_request_id_headers:
        headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex

    plain_kind, stream_kind = ANSWERS.get(kind, (PlainAnswer, StreamAnswer))
    if not body.stream:
        whole = await _whole(instance, plain_kind(generation, request_id, model, int(time.time())), headers)
        if isinstance(whole.body, bytes):
            _store(instance, body, request_id, whole.body)
        return whole
    return await _streamed(instance, request, stream_kind, generation, request_id, model, headers)


async def _streamed(
    instance: EmulatedInstance,
    request: web.Request,
    kind: type[StreamAnswer],
    generation: Generation,
    request_id: str,
    model: str,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    # vLLM sends the head of a stream at once, even while the request waits.
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
    response.enable_chunked_encoding()
    await response.prepare(request)
    if request.transport is None:
        raise CutError
    stream = kind(generation, request_id, model, int(time.time()), request.transport)
    instance.submit(stream)
    try:
        await stream.done
    finally:
        instance.withdraw(stream)
    if isinstance(stream, StreamResponse):
        _store(instance, generation.body, request_id, stream.whole)
    await response.write_eof()
    return response


def _store(instance: EmulatedInstance, body: Body, response_id: str, whole: bytes) -> None:
    if isinstance(body, ResponseBody) and body.store and instance.spec.store_responses:
        instance.responses[response_id], instance.inputs[response_id] = whole, as_items(body.input)
        if len(instance.responses) > MOST_STORED:
            oldest = next(iter(instance.responses))
            del instance.responses[oldest], instance.inputs[oldest]


def _before(instance: EmulatedInstance, response_id: str) -> list[dict[str, Any]]:
    """Return the conversation up to a stored response, without its instructions and calls of tools, as vLLM takes it up."""
    if response_id not in instance.responses:
        raise _no_response(response_id)
    output = orjson.loads(instance.responses[response_id])["output"]
    said = [{"role": "assistant", "content": item["content"]} for item in output if item["type"] == "message"]
    return [*instance.inputs[response_id], *said]


def _checked(instance: EmulatedInstance, body: Body, model: str) -> Generation:
    """Return the request *body* for the engine. Raises ApiError as vLLM answers."""
    _check_alias(instance, model)
    if isinstance(body, ResponseBody):
        if body.background:
            raise ApiError(400, "invalid_request_error", NO_BACKGROUND, "background")
        if body.previous_response_id is not None:
            body.input = [*_before(instance, body.previous_response_id), *as_items(body.input)]
    instance.admit(body.n or 1)
    return resolve(body, instance.spec)


async def sleep(instance: EmulatedInstance, request: web.Request) -> web.Response:
    level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
    if not level.isdigit():
        raise _bad_query("int_parsing", "level", _NOT_INTEGER, level)
    if int(level) > 2:
        raise _bad_query("less_than_equal", "level", "Input should be less than or equal to 2", level, {"le": 2})
    if mode not in SLEEP_MODES:
        expected = "'abort', 'wait' or 'keep'"
        raise _bad_query("literal_error", "mode", f"Input should be {expected}", mode, {"expected": expected})
    await instance.sleep(int(level), cast(SleepMode, mode))
    return json_response({"status": "sleeping", "level": int(level)})


_NOT_INTEGER = "Input should be a valid integer, unable to parse string as an integer"


def _bad_query(kind: str, name: str, message: str, value: str, context: dict[str, object] | None = None) -> ApiError:
    return malformed([entry(kind, f"query.{name}", message, value, context)], f"query.{name}")


async def wake_up(instance: EmulatedInstance, request: web.Request) -> web.Response:
    tags = request.query.getall("tags", []) or None
    awake = await instance.wake_up(tags)
    return json_response({"status": "awake" if awake else "sleeping", "tags": tags})


async def is_sleeping(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"is_sleeping": instance.asleep})


async def collective_rpc(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Run `reload_weights`, the only method of vLLM's workers that is emulated."""
    method = validated(RpcBody, decoded(await request.read() or b"{}")).method
    if method != "reload_weights":
        raise ApiError(500, "InternalServerError", f"'Worker' object has no attribute '{method}'")
    await instance.reload_weights()
    return json_response({"results": [None]})


async def reset_prefix_cache(instance: EmulatedInstance, request: web.Request) -> web.Response:
    return json_response({"success": instance.reset_prefix_cache()})


async def load_lora_adapter(instance: EmulatedInstance, request: web.Request) -> web.Response:
    """Load an adapter as vLLM does. Its content is not read, but an absolute path must exist."""
    body = validated(AdapterBody, decoded(await request.read() or b"{}"))
    name, path = body.lora_name, body.lora_path
    if not name or not path:
        raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
    if name == instance.spec.model:
        raise ApiError(400, "InvalidUserInput", f"The lora adapter '{name}' conflicts with a served base model.")
    if name in instance.adapters.paths and not body.load_inplace:
        raise ApiError(
            400,
            "InvalidUserInput",
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
        )
    if path.startswith("/") and not os.access(path, os.R_OK):
        raise ApiError(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
    instance.adapters.paths[name] = path
    await asyncio.sleep(instance.adapters.use(name))
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.", content_type=None)


async def unload_lora_adapter(instance: EmulatedInstance, request: web.Request) -> web.Response:
    name = validated(AdapterName, decoded(await request.read() or b"{}")).lora_name
    if not name:
        raise ApiError(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
    if not instance.adapters.unload(name):
        raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.", content_type=None)


def _random_id() -> str:
    return uuid.uuid4().hex[:16]
