"""Figures of requests: the same whether their relay is in this process or another."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch import port
from controlplane.dispatch.monitoring import measures
from controlplane.dispatch.monitoring.measures import Measures, promised_in, scopes_of
from controlplane.dispatch.monitoring.windows import Count, Latency
from controlplane.dispatch.transport import ToDispatcher
from controlplane.gateway.models import Outcome

ARRIVALS = st.builds(port.Arrived, st.sampled_from(["m", "n"]))
TIMES_MS = st.none() | st.floats(0, 1e6)
TOKENS = st.integers(0, 2**31)
ENDS = st.builds(
    port.Ended,
    model=st.sampled_from(["m", "n"]),
    region=st.sampled_from(["", "east", "west"]),
    instance=st.sampled_from(["", "m-0", "m-1"]),
    slo_class=st.sampled_from(["interactive", "batch"]),
    asked_class=st.sampled_from(["", "interactive"]),
    outcome=st.sampled_from([each.value for each in Outcome]),
    prompt_tokens=TOKENS,
    output_tokens=TOKENS,
    cached_tokens=st.none() | TOKENS,
    expected_cached_tokens=st.none() | TOKENS,
    expected_by=st.sampled_from(["", port.KV_EVENTS, port.ESTIMATE]),
    queue_ms=TIMES_MS,
    ttft_ms=TIMES_MS,
    itl_ms=TIMES_MS,
    e2e_ms=st.floats(0, 1e6),
    held_ms=st.floats(0, 1e6),
    slo_met=st.none() | st.booleans(),
    objective=st.sampled_from([0.95, 0.5]),
    ttft_target_ms=st.none() | st.integers(1, 60_000),
    at_door=st.sampled_from(["", "late", "degraded", "refused"]),
    asked_model=st.sampled_from(["", "chat"]),
    model_rule=st.sampled_from(["", "weights"]),
    adapter=st.sampled_from(["", "sql"]),
)


def figures(records) -> object:
    now_s = [1000.0]
    counted = Measures(lambda: now_s[0])
    for record in records:
        counted.take(record)
    now_s[0] += 2
    windows = counted.windows
    windows.advance(now_s[0])
    scopes = {scope for model in "mn" for region in ("", "east", "west") for scope in scopes_of(model, region)}
    named = [*scopes, *(f"instance m-{at}" for at in range(2))]
    named += [promised_in(scope, each) for scope in scopes for each in ("interactive", "batch")]
    groups = {name: group for name in named if (group := windows.known(name)) is not None}
    return msgspec.to_builtins(
        [
            {name: [windows.total(group, what, 60) for what in Count] for name, group in sorted(groups.items())},
            {
                name: [windows.percentiles(group, what, (50, 95)) for what in Latency]
                for name, group in sorted(groups.items())
            },
            {scope: [one.as_dict() for one in counted.service_levels.of(scope)] for scope in sorted(scopes)},
            *(sorted(each.items()) for each in (counted.totals, counted.tokens, counted.at_door, counted.judged)),
            *(sorted(each.items()) for each in (counted.cache_tokens, counted.other_models)),
            counted.ttft_targets_ms,
        ]
    )


@given(st.lists(ENDS | ARRIVALS, max_size=30))
def test_figures_are_the_same_of_a_relay_in_another_process(records):
    decoder = msgspec.msgpack.Decoder(list[ToDispatcher])
    passed = decoder.decode(msgspec.msgpack.encode(records))
    assert msgspec.json.encode(figures(passed)) == msgspec.json.encode(figures(records))  # 5 is not 5.0 there


@given(st.lists(ENDS, max_size=30))
def test_what_limits_refuse_and_tenants_cancel_has_not_failed(records):
    now_s = [1000.0]
    counted = Measures(lambda: now_s[0])
    for record in records:
        counted.take(record)
    counted.windows.advance(now_s[0] + 2)
    fleet = counted.windows.group(measures.FLEET)
    failed = sum(each.outcome == Outcome.FAILED for each in records)
    assert [counted.windows.total(fleet, each, 60) for each in (Count.FAILED, Count.FINISHED)] == [failed, len(records)]


def test_outcomes_are_those_of_the_ledger():
    assert (Outcome.DONE.value, Outcome.FAILED.value) == (measures.DONE, measures.FAILED)
