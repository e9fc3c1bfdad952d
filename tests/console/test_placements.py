"""Placement explanations: traces of every policy, old and new, and the predicted length against the real one."""

import pytest
from django.urls import reverse

from controlplane.console.formats import NONE
from controlplane.console.pages.requests import placements


def seen(name, score=None, parts=None, **changes):
    return {
        "instance": name,
        "accepting": True,
        "room": score is not None,
        "running": 3,
        "remaining_tokens": 800,
        "kv_tokens": 900,
        "score": score,
        "parts": parts or {},
    } | changes


DELAY = {
    "instance": "one",
    "region": "us-east",
    "policy": "least_delay",
    "ordering": "fcfs",
    "waited_ms": 0.2,
    "waiting": 0,
    "chosen_because": "Least delay, 3.41 s; next is two with 6.90 s.",
    "length": {"tokens": 120, "upper_tokens": 300, "source": "trees 3"},
    "seen": [
        seen(
            "one",
            3.41,
            {"predicted_ttft_ms": 60.0, "decode_s": 2.9, "others_s": 0.45, "memory_s": 0.0, "affinity_tokens": 512},
        ),
        seen(
            "two",
            6.90,
            {"predicted_ttft_ms": 100.0, "decode_s": 2.9, "others_s": 3.9, "memory_s": 0.0, "affinity_tokens": 0},
        ),
        seen("three", room=False),
        seen("four", accepting=False, room=False),
    ],
}


def test_candidates_are_compared_by_their_scores_and_parts():
    step = placements.step(DELAY)
    assert step.columns == ("TTFT", "Decode", "Delay to others", "Memory penalty", "Prefix cached")
    one, _, three, four = step.candidates
    assert [candidate.chosen for candidate in step.candidates] == [True, False, False, False]
    assert (one.score, one.parts) == ("3.41 s", ("60 ms", "2.90 s", "450 ms", "0 s", "512"))
    assert (three.room, three.score, three.parts[0]) == ("full", NONE, NONE)
    assert four.room == "takes no work"


@pytest.mark.parametrize(
    ("policy", "score", "parts", "texts"),
    [
        ("least_request", 4, {"requests": 4}, ["4", "4"]),
        ("minimum_use", 0.42, {"kv_use": 0.42}, ["42%", "42%"]),
        ("join_shortest_queue", 900, {"prefill_tokens": 300, "decode_tokens": 600}, ["900", "300", "600"]),
        (
            "preserve",
            12_500,
            {"prefill_tokens": 400, "decode_tokens": 2_100, "memory_tokens": 10_000, "peak_kv": 1.07},
            ["12.5k", "400", "2,100", "10.0k", "107%"],
        ),
        ("round_robin", None, {}, [NONE]),
    ],
)
def test_every_policy_is_shown_in_its_own_units(policy, score, parts, texts):
    step = placements.step({"instance": "one", "policy": policy, "seen": [seen("one", score, parts, room=True)]})
    (candidate,) = step.candidates
    assert [candidate.score, *candidate.parts] == texts
    assert step.why


def page(client, row) -> str:
    answer = client.get(reverse("console:request", args=[row.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_page_says_why_and_what_was_predicted(reader, make_request):
    html = page(reader, make_request(instance="one", trace=[DELAY], predicted_output_tokens=120, output_tokens=96))
    for words in (
        "Least delay, 3.41 s; next is two with 6.90 s.",
        "Delay to others",
        "takes no work",
        "By trees 3",
        "Predicted 120 tokens",
        "0.9 quantile 300 tokens",
        "Actual 96 tokens: predicted 24 (25%) too many",
        "Loads as the decision saw them",
    ):
        assert words in html, words
    assert html.count('<span class="tag">chosen</span>') == 1


def test_what_was_not_recorded_is_said(reader, make_request):
    html = page(reader, make_request())
    for words in (
        "the fewest tokens still to process",
        "What predicted it was not recorded",
        "Predicted 64 tokens",
        "Actual 40 tokens: predicted 24 (60%) too many",
    ):
        assert words in html, words
    never = make_request(trace=[], outcome="rejected", error_code="queue_full", predicted_output_tokens=0)
    assert "It was never placed: queue_full" in page(reader, never)


def test_a_prediction_that_cannot_be_judged_says_so(reader, make_request):
    trace = [DELAY | {"length": {"tokens": 40, "upper_tokens": 90, "source": "prior", "why": "late"}}]
    html = page(reader, make_request(trace=trace, outcome="cancelled"))
    assert "nothing to compare with" in html
    assert "answer was late" in html
    row = make_request(trace=trace, output_tokens=400)
    assert "exceeded" in page(reader, row)
    assert placements.predicted(make_request(output_tokens=64)).verdict == "predicted exactly"


def test_a_tenants_people_see_what_they_asked_and_got(as_member, make_request):
    """Neither its place in the fleet nor the other requests there: `tests/access` checks every address."""
    row = make_request(
        instance="one", trace=[DELAY], predicted_output_tokens=120, outcome="failed", status_code=502,
        error_code="upstream_failed", error_message="The request was tried on 3 instances.",
    )  # fmt: skip
    html = page(as_member, row)
    assert "upstream_failed, status 502: The request was tried on 3 instances." in html
    assert "Predicted 120 tokens" in html
    for hidden in ("Why this instance", "Least delay", "Placements tried", reverse("console:instance", args=["one"])):
        assert hidden not in html


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"streamed": False, "ttft_ms": None}, "not streamed, so its first token is not known"),
        ({"outcome": "cancelled"}, "cancelled by the caller"),
        ({"outcome": "failed", "status_code": 400}, "the request itself was at fault"),
        ({}, "the class has no target"),
    ],
)
def test_no_verdict_is_explained(reader, make_request, values, why):
    assert f"not judged: {why}" in page(reader, make_request(slo_met=None, **values))
    assert "not judged" not in page(reader, make_request(slo_met=False))
