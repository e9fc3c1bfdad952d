"""Events of a stream that may be evicted are passed on as when each is parsed, also where most of them are not."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.admission.validation import Kind, parse
from controlplane.gateway.upstream import streams
from controlplane.gateway.upstream.answers import Usage
from controlplane.gateway.upstream.continuation import Kept

BODIES = {
    Kind.CHAT: {"model": "m", "messages": [{"role": "user", "content": "say"}], "max_tokens": 50},
    Kind.COMPLETION: {"model": "m", "prompt": "say", "max_tokens": 50},
}


class Responder:
    def __init__(self):
        self.sent = []

    def write_now(self, data):
        self.sent.append(data)
        return True


def sent_by_instance(kind, tokens):
    """Return the events of an answer of *tokens*, (text, ids)."""
    chat, head = kind is Kind.CHAT, {"id": "x", "object": streams.EVENT_KIND[kind], "created": 1, "model": "m"}
    events = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}]
    events = events if chat else []
    for at, (text, ids) in enumerate(tokens):
        said = {"delta": {"content": text}} if chat else {"text": text}
        ends = {"finish_reason": "stop" if at == len(tokens) - 1 else None}
        prompt = {} if chat else {"prompt_token_ids": [1, 2] if not at else None}
        events.append({"choices": [{"index": 0, **said, "logprobs": None, **ends, **prompt, "token_ids": ids}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens), "total_tokens": 3}})
    written = [json.dumps(head | event, separators=(",", ":"), ensure_ascii=False).encode() for event in events]
    return [b"data: " + event + b"\n\n" for event in (*written, b"[DONE]")]


def carried(kind, pieces):
    """Return what the tenant gets, what is kept, and how many events were parsed."""
    call = parse(json.dumps(BODIES[kind] | {"stream": True}).encode(), kind, max_depth=64, most_bytes=10_000)
    ticket = SimpleNamespace(call=call, kept=Kept(), output_tokens=0)
    responder = Responder()
    stream = streams.KeptStream(ticket, responder, Usage(), "", lambda ticket: None)
    parsed, event_of = [], stream._event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.KeptStream, "_event", lambda self, event: parsed.append(event) or event_of(event))
        for piece in pieces:
            stream._take(piece)
    body = b"".join(responder.sent)
    return (body, ticket.kept.ids, ticket.kept.shown, ticket.kept.prompt_ids, ticket.output_tokens), len(parsed)


@given(
    st.sampled_from(list(BODIES)),
    st.lists(
        st.tuples(st.text('ab"\\\n\u00e9', max_size=3), st.lists(st.integers(0, 999), min_size=1, max_size=2)),
        min_size=2,
    ),
    st.lists(st.integers(1, 400), max_size=5),
)
def test_events_that_are_not_parsed_are_as_those_that_are(kind, tokens, cuts):
    events = sent_by_instance(kind, tokens)
    joined, places = b"".join(events), sorted({0, *cuts})
    cut_anywhere = [joined[begin:end] for begin, end in zip(places, [*places[1:], None], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.KeptShape, "of", lambda *_: None)
        expected, _ = carried(kind, events)
    for pieces in (events, cut_anywhere, [events[0], events[1], b"".join(events[2:])]):
        assert carried(kind, pieces)[0] == expected


@pytest.mark.parametrize("kind", BODIES)
def test_most_events_are_not_parsed(kind):
    events = sent_by_instance(kind, [("word ", [7 + number]) for number in range(40)])
    assert carried(kind, events)[1] < 8
