"""Placement explanations: traces of every policy, old and new, and the predicted length against the real one."""

from types import SimpleNamespace

import pytest
from django.urls import reverse

from controlplane.console.formats import NONE
from controlplane.console.pages.requests import placements
from controlplane.gateway import explanation
from scheduling.routing import candidates


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


def numbers(**named: float) -> list[float]:
    """What a router weighed of an instance, as `scheduling.routing.candidates` has it."""
    row = [0.0] * candidates.COLUMNS
    for name, value in ({"ACCEPTING": 1.0, "RUNNING": 3.0, "REMAINING": 800.0, "KV": 900.0} | named).items():
        row[getattr(candidates, name)] = value
    return row


DELAY = {
    "instance": "one",
    "region": "us-east",
    "policy": "least_delay",
    "ordering": "fcfs",
    "waited_ms": 0.2,
    "waiting": 0,
    "prompt_tokens": 600,
    "cached_tokens": 512,
    "cached_by": "kv_events",
    "length": {"tokens": 120, "upper_tokens": 300, "source": "trees 3"},
    "seen": {
        "three": numbers(IN_SECONDS=1, SCORE=1.0),
        "four": numbers(IN_SECONDS=1, ACCEPTING=0),
        "two": numbers(ROOM=1, IN_SECONDS=1, SCORE=6.9, PREFILL=0.1, DECODE=2.9, OTHERS=3.9),
        "one": numbers(ROOM=1, IN_SECONDS=1, SCORE=3.41, PREFILL=0.06, DECODE=2.9, OTHERS=0.45, CACHED=512, KNOWN=1),
    },
}
REQUEST = SimpleNamespace(application="review", run="r1", unit="", adapter="sql")
BECAUSE = "Least delay, 3.41 s; next is two with 6.90 s. 512 of 600 prompt tokens cached there (from KV events)."


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, BECAUSE),
        ({"cached_by": "estimate"}, "512 of 600 prompt tokens expected in its cache."),
        ({"cached_by": "estimate", "cached_tokens": 0}, "next is two with 6.90 s."),
        ({"seen": {"one": numbers(ROOM=1)}, "cached_by": ""}, "The only instance."),
        ({"seen": {"one": numbers(ROOM=1), "two": numbers()}, "cached_by": ""}, "The only one shown with room."),
        (
            {"pulled": {"groups": 2, "group": 7, "waiting": 4, "due_in_s": -1.5}, "cached_by": ""},
            "Pulled from its own virtual queue of 2 request groups: group 7, 4 waiting, the first due 1.5 s ago.",
        ),
        (
            {"seen": {"one": numbers(ROOM=1, AHEAD=1, ALLOWED=3)}, "round_trip_ms": 40.0, "cached_by": ""},
            "All instances were full; sent early to hide a round trip of 40 ms (1 of at most 3 ahead).",
        ),
    ],
)
def test_the_numbers_of_a_decision_are_put_into_words(changed, words):
    assert words in explanation.explained(DELAY | changed, REQUEST)["chosen_because"]


def test_names_of_the_request_are_added_and_other_steps_stay():
    run = {"rank_s": 2.5, "attained_s": 1.0, "remaining_s": 1.5, "worst_s": 9.0, "first": True}
    told = explanation.explained(DELAY | {"run": run, "adapter_was": "on the GPU"}, REQUEST)
    assert told["run"]["words"].startswith(
        "Run r1 of review: moved first by an operator, rank 2.50 s. It has had 1.00 s"
    )
    assert told["adapter"] == {"name": "sql", "was": "on the GPU"}
    for step in ({"held": "Held."}, {"instance": "one", "chosen_because": "So.", "seen": [seen("one")]}):
        assert explanation.explained(step, REQUEST) == step


def test_candidates_are_compared_by_their_scores_and_parts():
    step = placements.step(explanation.explained(DELAY, REQUEST))
    assert step.columns == ("TTFT", "Decode", "Delay to others", "Memory penalty", "Prefix cached", "KV peak ahead")
    one, _, three, four = step.candidates
    assert [candidate["chosen"] for candidate in step.candidates] == [True, False, False, False]
    assert (one["score"], one["parts"]) == ("3.41 s", ["60 ms", "2.90 s", "450 ms", "0 s", "512", "0%"])
    assert (three["room"], three["score"]) == ("full", NONE)
    assert four["room"] == "takes no work"


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
    assert [candidate["score"], *candidate["parts"]] == texts


def page(client, row) -> str:
    answer = client.get(reverse("console:request", args=[row.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_page_says_why_and_what_was_predicted(reader, make_request):
    html = page(reader, make_request(instance="one", trace=[DELAY], predicted_output_tokens=120, output_tokens=96))
    for words in (
        BECAUSE,
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
