"""The body for an instance: the tenant's, with what we change in it. It is changed nowhere else."""

from collections.abc import Mapping
from typing import Any

import msgspec

from controlplane.dispatch.port import Placed
from controlplane.gateway.admission.forms import with_field
from controlplane.gateway.admission.keys import TIERS
from controlplane.gateway.admission.validation import SPEECH, Call, Kind
from controlplane.gateway.upstream.connections import Pieces
from controlplane.gateway.upstream.continuation import SAMPLING, Kept
from scheduling.queueing.ordering import BY_CLASS, ORDERINGS, engine_priority

PRIORITY_BAND = 1000  # vLLM priorities per SLO class; a tenant may demote its own requests within the band
MAX_BACK = 499
NOT_RESTORED: dict[str, list[str]] = {"kv_load_tiers": []}
"""With it vLLM 0.32 computes a prompt of which it has KV in CPU memory (`OffloadingConnectorScheduler`)."""


def body_for(call: Call, placed: Placed, kept: Kept | None) -> Pieces:
    """Return the body of *call* for the instance where it was *placed*: it continues what was *kept* of an answer."""
    priority = upstream_priority(ORDERINGS[placed.ordering], placed.priority, call.priority, placed.queue_key_s)
    more = {"kv_transfer_params": NOT_RESTORED} if placed.recompute else {}
    if kept is not None and kept.opened:
        return continuation(call, kept, priority, more)
    return payload(call, priority, more | ({"return_token_ids": True} if kept is not None else {}))


def payload(call: Call, priority: int, more: Mapping[str, Any] = {}) -> Pieces:
    """Return the body for an instance in pieces: the tenant's, with our priority and *more* fields, and with usage requested
    for a stream.

    Fields are spliced in front where the tenant's body lacks them, so that everything else stays exactly as it was sent, and
    is not copied. A `request_id` of a response is left out: vLLM stores the response by it, over one of another tenant.
    """
    body, raw = call.body, call.raw
    ask_usage = call.stream and not call.include_usage
    if call.kind in SPEECH:  # it reads no priority; of two fields of one name vLLM takes the last
        added = {"model": call.model} if call.renamed else {}
        if ask_usage:
            added |= {"stream_include_usage": "true", "stream_continuous_usage_stats": "false"}
        for name, value in added.items():
            raw = with_field(raw, call.content_type, name, value)
        return (raw,)
    if not call.kind.computes:  # an engine that has no part in it
        return (msgspec.json.encode(body) if call.renamed else raw,)
    ours = body.get("service_tier") not in TIERS
    named = call.kind is Kind.RESPONSE and "request_id" in body
    if call.renamed or ours or named or "priority" in body or (ask_usage and "stream_options" in body):
        changed = body | {"priority": priority, **more}
        if ours:
            changed["service_tier"] = "auto"
        if named:
            del changed["request_id"]
        if ask_usage:
            # vLLM ignores `continuous_usage_stats` alone: together with our request every event would have a usage.
            options = body["stream_options"] if isinstance(body.get("stream_options"), dict) else {}
            changed["stream_options"] = {"include_usage": True} | {
                name: value
                for name, value in options.items()
                if name not in ("include_usage", "continuous_usage_stats")
            }
        return (msgspec.json.encode(changed),)
    front = b'{"priority":%d,' % priority
    for name, value in more.items():
        front += b'"%s":%s,' % (name.encode(), msgspec.json.encode(value))
    if ask_usage:
        front += b'"stream_options":{"include_usage":true},'
    return front, memoryview(raw)[raw.index(b"{") + 1 :]


def continuation(call: Call, kept: Kept, priority: int, more: Mapping[str, Any]) -> Pieces:
    """Return the body of a completion that continues *call* after what was *kept* of its answer."""
    assert kept.prompt_ids is not None
    assert call.max_tokens is not None
    body: dict[str, Any] = {name: call.body[name] for name in SAMPLING if name in call.body}
    body |= {
        "model": call.model,
        "prompt": [*kept.prompt_ids, *kept.ids],
        "max_tokens": call.max_tokens - len(kept.ids),
        "min_tokens": max(0, call.min_tokens - len(kept.ids)),
        "priority": priority,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    return (msgspec.json.encode(body),)


def upstream_priority(ordering: int, class_priority: int, asked: int, queue_key_s: float) -> int:
    """Return vLLM's priority by the endpoint's *ordering* (an index of `ordering.ORDERINGS`). *queue_key_s*: see `Placed`.

    By arrival or priority the SLO class decides, and a tenant's own `priority` only demotes a request within its class.
    Otherwise it is the request's queue key; a demotion by n counts as an arrival n seconds later.
    """
    back = min(max(asked, 0), MAX_BACK)
    if ordering in BY_CLASS:
        return class_priority * PRIORITY_BAND + back
    return engine_priority(ordering, class_priority, queue_key_s + back)
