"""What an instance is sent: the tenant's own bytes, with our priority."""

import msgspec

from controlplane.gateway.admission.keys import TIERS
from controlplane.gateway.admission.validation import Call
from scheduling.queueing.ordering import FCFS, PRIORITY, engine_priority

PRIORITY_BAND = 1000  # vLLM priorities of one SLO class; a tenant may step its own requests back within the band
MOST_BACK = 499
BY_CLASS = frozenset({FCFS, PRIORITY})


def payload(call: Call, raw: bytes, priority: int, *, streamed: bool, token_ids: bool = False) -> bytes:
    """The body for the instance: the tenant's bytes, with our priority, and asking for usage at the end of a stream.

    *streamed* says whether we want a stream, also where the tenant does not. With *token_ids* for those of prompt and
    output too, which the body does not ask for itself.

    Fields are spliced in front where the tenant's body lacks them, so that everything else stays exactly as it was sent.
    """
    body = call.body
    ask_usage = streamed and not call.include_usage
    ask_stream = streamed and not call.stream
    ours = body.get("service_tier") not in TIERS
    if (
        ours
        or "priority" in body
        or (ask_usage and "stream_options" in body)
        or (ask_stream and ("stream" in body or "stream_options" in body))
    ):
        changed = body | {"priority": priority}
        if ask_stream:
            changed["stream"] = True
        if ours:
            changed["service_tier"] = "auto"
        if token_ids:
            changed["return_token_ids"] = True
        if ask_usage:
            # Alone, vLLM takes `continuous_usage_stats` for nothing: with our wish beside it every event would have usage.
            options = body.get("stream_options") or {}
            changed["stream_options"] = {"include_usage": True} | {
                name: value
                for name, value in options.items()
                if name not in ("include_usage", "continuous_usage_stats")
            }
        return msgspec.json.encode(changed)
    front = b'{"priority":%d,' % priority
    if token_ids:
        front += b'"return_token_ids":true,'
    if ask_stream:
        front += b'"stream":true,'
    if ask_usage:
        front += b'"stream_options":{"include_usage":true},'
    return front + raw.lstrip()[1:]


def upstream_priority(ordering: int, class_priority: int, asked: object, queue_key_s: float) -> int:
    """vLLM's priority by the endpoint's *ordering* (`scheduling.queueing.ordering.ORDERINGS`). *queue_key_s*: see `Placed`.

    By arrival or priority the SLO class decides, and a tenant's own `priority` only steps a request back within its class.
    Otherwise it is the key that the request was queued by, and stepped back by n it counts as having come n seconds later.
    """
    back = min(max(asked, 0), MOST_BACK) if isinstance(asked, int) else 0
    if ordering in BY_CLASS:
        return class_priority * PRIORITY_BAND + back
    return engine_priority(ordering, class_priority, queue_key_s + back)
