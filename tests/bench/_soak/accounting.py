"""Comparison of every client request with its ledger row.

A missing row is accounted for if the gateway writes none (rejected before it had an owner), or if a kill of the web
process cut the connection or the write of the row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.bench._soak.killer import Kill
from tests.bench._soak.ray import MODEL as RAY_MODEL
from tests.bench._soak.seen import End, Seen

# Answers without a ledger row: requests without an owner, or that could not be queued.
WITHOUT_ROW = frozenset(
    {
        "invalid_json", "json_too_deep", "missing_required_parameter", "invalid_type", "invalid_value",
        "unknown_slo_class", "invalid_api_key", "slo_class_not_allowed",
        "model_not_found", "unknown_url", "unsupported_endpoint", "method_not_allowed", "request_too_large",
        "unknown_region", "unsupported_encoding", "keys_unavailable", "standing_by", "stopping",
    }
)  # fmt: skip
TURNED_AWAY = frozenset({429})
LEDGER_FLUSH_S = 1.5  # PILOTHOUSE_LEDGER_FLUSH_S, and the transaction
SETTLES_S = {"web": 3.0, "emulator": 10.0}  # parts whose loss a tenant may notice, and for how long after
BROKEN = frozenset({End.CUT, End.UNREACHED, End.LEFT})
RAYLET_CUTS_S = 10.0  # within which its streams end, where they cannot be continued
RELAY_CUTS_S = 3.0  # within which its clients see that it is gone, on a busy machine
MOST_EXAMPLES = 20


@dataclass(slots=True)
class Account:
    """Result of the comparison, by request."""

    unaccounted: list[tuple[Seen, str]] = field(default_factory=list)
    failed_outside_kills: list[tuple[Seen, str]] = field(default_factory=list)
    cut_by_kill: int = 0
    cut_before_a_byte: int = 0  # of those, what a client may send again
    lost_by_kill: list[tuple[Seen, str]] = field(default_factory=list)
    failed_in_kills: int = 0
    turned_away: int = 0
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def rows_lost(self) -> int:
        return len(self.lost_by_kill) + sum(why == "no row" for _, why in self.unaccounted)

    def examples(self, which: list[tuple[Seen, str]]) -> list[str]:
        return [
            f"{seen.kind} {seen.request_id}: {why} (client: {seen.end} {seen.status} {seen.code} {seen.why}, "
            f"{datetime.fromtimestamp(seen.ended_at, UTC):%H:%M:%S.%f})"
            for seen, why in which[:MOST_EXAMPLES]
        ]


def account(seen: Iterable[Seen], rows: Mapping[str, list[dict[str, Any]]], kills: Iterable[Kill]) -> Account:
    """Compare the clients' view with the ledger's *rows* by request id, oldest first."""
    total, kills = Account(), list(kills)
    for one in seen:
        by_end = total.by_kind.setdefault(one.kind, Counter())
        by_end[f"{one.end} {one.code or one.status or ''}".strip() if one.end is not End.DONE else "done"] += 1
        _judge_row(total, one, rows.get(one.request_id, []), kills)
        _judge_outcome(total, one, kills)
    return total


def _judge_row(total: Account, one: Seen, rows: list[dict[str, Any]], kills: list[Kill]) -> None:
    if len(rows) > one.attempts:
        total.unaccounted.append((one, f"{len(rows)} rows for {one.attempts} attempts"))
        return
    why = disagreement(one, rows)
    if not why:
        return
    if one.end is End.LEFT and rows and rows[-1]["outcome"] in ("rejected", "failed") and _excused(one, kills):
        total.failed_in_kills += 1  # it had left, and was refused or cut off by the outage
        return
    web = [kill for kill in kills if kill.part in ("web", "relay")]
    if any(_cut_by_relay(one, kill) for kill in kills):
        total.cut_by_kill += 1
        total.cut_before_a_byte += not one.status
    elif one.end in (End.CUT, End.UNREACHED, End.LEFT, End.INTERRUPTED) and any(
        kill.part == "web" and kill.covers(one.sent_at, one.ended_at, SETTLES_S["web"]) for kill in web
    ):
        total.cut_by_kill += 1
    elif not rows and any(one.ended_at - 0.2 <= kill.at <= one.ended_at + LEDGER_FLUSH_S for kill in web):
        total.lost_by_kill.append((one, why))
    else:
        total.unaccounted.append((one, why))


def disagreement(one: Seen, rows: list[dict[str, Any]]) -> str:
    """Return the reason why the ledger differs from the client's view; empty if it does not."""
    row = rows[-1] if rows else None
    match one.end:
        case End.UNREACHED | End.NEVER_SENT:
            return f"a row ({row['outcome']}) of a request that was never sent" if row and one.attempts == 1 else ""
        case End.WRONG:
            return "the client got a wrong answer"
        case End.CUT:
            return f"the connection broke; {row['outcome'] if row else 'no row'}"
        case End.REFUSED if row is None:
            return "" if one.code in WITHOUT_ROW and not one.key_ends else "no row"
        case End.REFUSED | End.INTERRUPTED if row is None:
            return "no row"
    if row is None:
        return "" if one.end is End.LEFT and one.unread else "no row"
    said = f"{row['outcome']} {row['status_code']} {row['error_code']}"
    match one.end:
        case End.REFUSED:
            agrees = row["outcome"] in ("failed", "rejected") and row["status_code"] == one.status
        case End.INTERRUPTED:
            agrees = row["outcome"] in ("failed", "rejected") and row["error_code"] == one.code
        case End.LEFT:
            agrees = row["outcome"] in ("cancelled", "done")
        case _:
            agrees = row["outcome"] == "done" and row["status_code"] == 200
    if not agrees:
        return f"the ledger says {said}"
    if one.model and row["model"] != one.model:
        return f"the ledger says model {row['model']}"
    if one.slo_class and row["slo_class"] != one.slo_class:
        return f"the ledger says class {row['slo_class']}"
    if one.end is End.DONE:
        for name in ("prompt_tokens", "output_tokens"):
            tokens = getattr(one, name)
            if tokens is not None and tokens != row[name]:
                return f"{name}: the ledger says {row[name]}, the client saw {tokens}"
    return ""


def _excused(one: Seen, kills: list[Kill]) -> bool:
    """Whether a kill of web, relay or emulator may have failed it."""
    return any(
        _cut_by_relay(one, kill)
        or (
            kill.part == "raylet"
            and one.model == RAY_MODEL
            and one.status == 200
            and 0 <= one.ended_at - kill.at <= RAYLET_CUTS_S
        )
        or (kill.part in SETTLES_S and kill.covers(one.sent_at, one.ended_at, SETTLES_S[kill.part]))
        for kill in kills
    )


def _cut_by_relay(one: Seen, kill: Kill) -> bool:
    """Whether *one* broke as a relay was killed: what others carry, and what begins later, has no excuse."""
    return kill.part == "relay" and one.end in BROKEN and -0.1 <= one.ended_at - kill.at <= RELAY_CUTS_S


def _judge_outcome(total: Account, one: Seen, kills: list[Kill]) -> None:
    """Whether the request got the expected result; only kills of web and emulator excuse a failure."""
    if one.end in (End.LEFT, End.NEVER_SENT) or (one.end in (End.DONE, End.REFUSED) and one.status in one.expects):
        return
    if one.key_ends and one.code == "invalid_api_key":
        return  # by its rule
    if one.status in TURNED_AWAY:
        total.turned_away += 1
        return
    if _excused(one, kills):
        total.failed_in_kills += 1
        return
    total.failed_outside_kills.append((one, "failed"))
