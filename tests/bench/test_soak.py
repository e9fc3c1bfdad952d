"""Tests of the soak's own checks, on synthetic requests, kills and lines; and some minutes of the real one."""

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.bench._soak import lines, mix, wrong
from tests.bench._soak.accounting import account
from tests.bench._soak.killer import RELAYED, STEPS, Kill
from tests.bench._soak.owners import Owners
from tests.bench._soak.seen import HTTP, End, Seen
from tests.bench._soak.stack import CHILD, PARTS
from tests.bench._soak.watch import Memory

WELL = frozenset({200})


def seen(end: End = End.DONE, *, at: float = 100.0, took_s: float = 1.0, **more) -> Seen:
    values = {"status": 200 if end is End.DONE else 0, "model": "m", "slo_class": "c", "attempts": 1} | more
    return Seen("r-1", "turn", WELL, sent_at=at, ended_at=at + took_s, end=end, **values)


def row(outcome: str = "done", status: int = 200, code: str = "", **more) -> dict:
    values = {"model": "m", "slo_class": "c", "outcome": outcome, "status_code": status, "error_code": code}
    return values | {"prompt_tokens": 5, "output_tokens": 7} | more


def judged(one: Seen, *rows: dict, kills: tuple[Kill, ...] = ()) -> tuple[int, int]:
    """Return (unaccounted, failed outside kills)."""
    total = account([one], {"r-1": list(rows)}, kills)
    return len(total.unaccounted), len(total.failed_outside_kills)


@pytest.mark.parametrize(
    ("one", "rows", "expected"),
    [
        (seen(prompt_tokens=5, output_tokens=7), [row()], (0, 0)),
        (seen(output_tokens=8), [row()], (1, 0)),  # the client counted another token
        (seen(), [], (1, 0)),
        (seen(), [row(), row()], (1, 0)),
        (seen(), [row(model="other")], (1, 0)),
        (seen(), [row(slo_class="other")], (1, 0)),
        (seen(), [row("failed", 502, "upstream_interrupted")], (1, 0)),
        (seen(End.REFUSED, status=400, code="invalid_json"), [], (0, 1)),
        (seen(End.REFUSED, status=404, code="model_not_found"), [row("failed", 404)], (0, 1)),
        (seen(End.REFUSED, status=503, code="hold_expired"), [], (1, 1)),
        (seen(End.REFUSED, status=503, code="hold_expired"), [row("failed", 503, "hold_expired")], (0, 1)),
        (seen(End.REFUSED, status=503, code="hold_expired"), [row()], (1, 1)),
        (seen(End.REFUSED, status=429, code="queue_full"), [row("rejected", 429, "queue_full")], (0, 0)),
        (seen(End.INTERRUPTED, code="upstream_interrupted"), [row("failed", 502, "upstream_interrupted")], (0, 1)),
        (seen(End.LEFT), [row("cancelled", 499, "client_disconnected")], (0, 0)),
        (seen(End.LEFT), [], (1, 0)),
        (seen(End.LEFT, unread=True), [], (0, 0)),
        (seen(End.DONE, unread=True), [], (1, 0)),
        (seen(End.LEFT), [row("failed", 500, "internal_error")], (1, 0)),
        (seen(End.LEFT), [row("rejected", 503, "model_unavailable")], (1, 0)),  # no kill explains it
        (seen(End.NEVER_SENT), [], (0, 0)),
        (seen(End.NEVER_SENT), [row()], (1, 0)),
        (seen(End.CUT), [], (1, 1)),
        (seen(End.UNREACHED), [], (0, 1)),
        (seen(End.REFUSED, status=401, code="invalid_api_key", key_ends=True), [row("failed", 401)], (0, 0)),
        (seen(End.REFUSED, status=401, code="invalid_api_key", key_ends=True), [], (1, 0)),
        (seen(End.INTERRUPTED, code="invalid_api_key"), [row("failed", 401, "invalid_api_key")], (0, 1)),
        (seen(End.DONE, attempts=2), [row("failed", 502, "upstream_failed"), row()], (0, 0)),
    ],
)
def test_a_request_is_accounted_for_by_a_row_that_agrees(one, rows, expected):
    assert judged(one, *rows) == expected


@pytest.mark.parametrize("how", [("rejected", 503, "model_unavailable"), ("failed", 502, "upstream_interrupted")])
def test_a_client_that_left_at_once_may_have_been_refused_or_cut_off_in_an_outage(how):
    assert judged(seen(End.LEFT), row(*how), kills=(Kill("emulator", 99.5, 100.5),)) == (0, 0)
    assert judged(seen(End.LEFT), row(*how), kills=(Kill("beat", 99.5, 100.5),)) == (1, 0)


def test_what_a_kill_of_the_web_process_cuts_is_counted_separately():
    web = Kill("web", at=100.5, back_at=105.0)
    cut = account([seen(End.CUT)], {}, [web])
    assert (cut.cut_by_kill, cut.failed_in_kills, cut.unaccounted, cut.failed_outside_kills) == (1, 1, [], [])
    unwritten = account([seen(at=99.0, took_s=1.0)], {}, [web])
    assert (len(unwritten.lost_by_kill), unwritten.unaccounted) == (1, [])
    assert judged(seen(at=90.0), kills=(web,)) == (1, 0), "ended long before the kill"
    assert judged(seen(End.CUT), kills=(Kill("redis", 100.5, 105.0),)) == (1, 1), "Redis cuts nobody's connection"
    assert judged(seen(End.CUT, at=140.0), kills=(web,)) == (1, 1)


def test_only_web_and_emulator_excuse_a_failure():
    failed = seen(End.INTERRUPTED, code="upstream_interrupted")
    rows = [row("failed", 502, "upstream_interrupted")]
    assert judged(failed, *rows, kills=(Kill("emulator", 100.2, 130.0),)) == (0, 0)
    assert judged(failed, *rows, kills=(Kill("celery", 100.2, 130.0),)) == (0, 1)


def test_a_killed_relay_excuses_what_breaks_with_it_and_nothing_else():
    relay = Kill("relay", at=101.0, back_at=106.0)
    cut = account([seen(End.CUT)], {}, [relay])
    assert (cut.cut_by_kill, cut.cut_before_a_byte, cut.unaccounted, cut.failed_outside_kills) == (1, 1, [], [])
    assert account([seen(End.CUT, status=200)], {}, [relay]).cut_before_a_byte == 0
    assert judged(seen(End.CUT, at=104.0), kills=(relay,)) == (1, 1), "others serve while it starts again"
    assert judged(seen(End.REFUSED, status=503), row("failed", 503), kills=(relay,)) == (0, 1)
    assert judged(seen(End.CUT), kills=(Kill("owner", 101.0, 102.0),)) == (1, 1), "an owner carries no bytes"


def test_owners_follow_each_other_with_epochs_that_grow():
    owners = Owners([(1.0, 1, "a"), (10.0, 2, "b"), (30.5, 3, "a")])
    assert owners.faults() == []
    assert (owners.takeover_s(30.0, 50.0), owners.takeover_s(12.0, 30.0)) == (0.5, None)
    owners.changes.append((31.0, 3, "b"))
    assert len(owners.faults()) == 1


def test_error_lines_within_kills_are_counted_separately_and_tracebacks_always():
    stamped = [
        (10.0, "web        | 2026-01-01 10:00:00,001 INFO controlplane: ERROR is only a word here" + "." * 90),
        (11.0, "web        | 2026-01-01 10:00:00,001 WARNING controlplane.gateway: row 17 is late"),
        (12.0, "web        | 2026-01-01 10:00:09,001 WARNING controlplane.gateway: row 18 is late"),
        (30.0, "celery     | [2026-01-01 10:00:00,001: ERROR/MainProcess] consumer: Connection to broker lost"),
        (30.1, "celery     | Traceback (most recent call last):"),
        (30.1, "web        | another part's line between"),
        (30.1, '  celery     |   File "x.py", line 3, in f'),
        (30.1, "celery     | redis.exceptions.ConnectionError: Connection closed by server."),
        (31.0, "redis ended (SIGKILL); starting it again in 0.5 s"),
        (90.0, "beat ended (exit status 1; last line: oh); starting it again in 0.5 s"),
    ]  # fmt: skip
    judged = lines.read(stamped, [Kill("redis", 29.9, 33.0)])
    assert judged.tracebacks == 1
    assert judged.traced == ["celery: redis.exceptions.ConnectionError: Connection closed by server."]
    assert judged.within.total() == 3
    assert judged.errors == 3
    assert sorted(judged.outside.values()) == [1, 2], "the same but for its numbers is one kind"


def test_memory_is_judged_by_the_longest_watched_process_of_a_part():
    memory = Memory()
    memory.samples["web", 1] = [(5.0 * n, 100 * 2**20 + n * 2**20) for n in range(721)]  # an hour, 12 MB a minute
    memory.samples["web", 2] = [(5.0 * n, 10**9 * n) for n in range(40)]
    memory.samples["beat", 3] = [(5.0 * n, 50 * 2**20) for n in range(10)]
    growth = memory.growth_mb_per_hour()
    assert growth == {"web": pytest.approx(720, rel=0.02)}


def test_errors_of_sdks_become_ends():
    request = HTTP.Request("POST", "http://x")
    refused = openai.APIConnectionError(request=request)
    refused.__cause__ = HTTP.ConnectError("refused")
    for error, end in (
        (refused, End.UNREACHED),
        (openai.APIConnectionError(request=request), End.CUT),
        (openai.APITimeoutError(request), End.LEFT),
        (HTTP.RemoteProtocolError("peer closed"), End.CUT),
    ):
        one = seen()
        one.failed(error)
        assert one.end is end
    wrong_answer = seen()
    wrong_answer.failed(AssertionError("a client judged something wrong"))
    assert judged(wrong_answer, row()) == (1, 1)


def test_every_part_is_killed_and_each_kind_has_its_name():
    assert {part for step in STEPS for part in step} == {*PARTS, CHILD}
    kinds = [kind.name for kind in mix.KINDS + wrong.KINDS]
    assert len(kinds) == len(set(kinds))


@pytest.mark.services
@pytest.mark.nightly
def test_ten_minutes_of_relays_and_dispatchers_under_kills(tmp_path: Path):
    detail = tmp_path / "detail.json"
    command = [
        sys.executable,
        "-m",
        "tests.bench",
        "soak",
        "--json",
        "--",
        "--minutes",
        "10",
        "--no-rollout",
        "--postgres",
    ]
    command += [
        "--relays",
        "2",
        "--streams",
        "300",
        "--rate",
        "15",
        "--per-s",
        "2",
        "--pause",
        "8",
        "--detail",
        str(detail),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    said = json.dumps(result, indent=1) + detail.read_text()
    assert result["tracebacks"] == result["processes_left"] == result["parts_not_back"] == 0, said
    assert result["requests_unaccounted"] == result["failed_outside_kills"] == 0, said
    assert result["ledger_rows_doubled"] == result["rows_lost"] == result["places_leaked"] == 0, said
    assert result["owners_two"] == [], said
    assert 0 <= result["finished_beyond_done"] <= result["requests_cut_by_kill"] / 5, said  # at their last token
    assert set(result["tokens_off_by"].values()) == {0}, said
    assert {step[0] for step in RELAYED} <= set(result["recovery_s"]), said


@pytest.mark.services
def test_some_minutes_of_the_whole_stack_under_kills(tmp_path: Path):
    detail = tmp_path / "detail.json"
    command = [sys.executable, "-m", "tests.bench", "soak", "--json", "--", "--minutes", "4.5", "--pause", "6"]
    done = subprocess.run([*command, "--detail", str(detail)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    said = json.dumps(result, indent=1) + detail.read_text()
    assert not result["stack_ended"], said
    assert result["tracebacks"] == 0, said
    assert result["requests_sent"] > 300, said
    assert result["requests_unaccounted"] == 0, said
    assert result["ledger_rows_doubled"] == result["rows_lost"] == result["places_leaked"] == 0, said
    assert (result["rollout"]["state"], result["rollout"]["old_lost"] <= 1) == ("rolled_back", True), said
    assert result["revoked_key"]["ended_by_its_rule"] == result["revoked_key"]["open"]["unanswered"] > 0, said
    assert result["parts_killed"] >= len(PARTS), said
    assert result["first_forecast_after_s"] is not None, said
    assert result["longest_without_forecast_s"] < 180, said
    assert result["processes_left"] == 0, said
