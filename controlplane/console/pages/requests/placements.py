"""Why this instance: the decision trace of a request as its page shows it, step by step, with what every score is made of.

`docs/papers/routing.md` says what a placement holds. Rows of older ledgers hold less: then only the loads are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.console.formats import NONE, count, duration, fixed, milliseconds, percent, quantity
from controlplane.console.live import held_work
from controlplane.gateway.models import LedgerRow, Outcome

PART_TITLES = {
    "requests": "Requests",
    "kv_use": "KV use",
    "prefill_tokens": "Prefill",
    "decode_tokens": "Decode",
    "memory_tokens": "Memory penalty",
    "predicted_ttft_ms": "TTFT",
    "decode_s": "Decode",
    "others_s": "Delay to others",
    "memory_s": "Memory penalty",
    "peak_kv": "KV peak ahead",
    "affinity_tokens": "Prefix cached",
}
WHY_PRIOR = {
    "late": "the model's answer was late",
    "failed": "the model failed",
    "senseless": "the model's answer made no sense",
    "resting": "the model rests after failures",
    "down": "the model's process is down",
    "off": "the model is switched off",
}


def part_text(name: str, value: float) -> str:
    """*value* with the unit that its name says."""
    if name.endswith("_ms"):
        return milliseconds(value)
    if name.endswith("_s"):
        return seconds(value)
    if name in ("kv_use", "peak_kv"):
        return percent(value)
    return quantity(value) if value >= 10_000 else count(value)


def seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value >= 100:
        return duration(value)
    return f"{fixed(value, 2)} s" if value >= 1 else milliseconds(value * 1000)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The length that was predicted, against the one that came, in tokens."""

    tokens: int
    upper: int | None
    source: str
    why: str
    real: int | None

    @property
    def error(self) -> int | None:
        return None if self.real is None else self.tokens - self.real

    @property
    def verdict(self) -> str:
        """`predicted 29 (24%) too many`"""
        if self.error is None or not self.real:
            return ""
        if self.error == 0:
            return "predicted exactly"
        side = "too many" if self.error > 0 else "too few"
        return f"predicted {count(abs(self.error))} ({percent(abs(self.error) / self.real)}) {side}"

    @property
    def within_upper(self) -> bool | None:
        return None if self.real is None or self.upper is None else self.real <= self.upper


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the trace. *columns* are the titles of the parts that its candidates have."""

    entry: Mapping[str, Any]
    why: str = ""  # why it was released
    candidates: Sequence[Mapping[str, Any]] = ()
    columns: tuple[str, ...] = ()
    held: str = ""  # how long the queue manager held it


def steps(trace: Sequence[Mapping[str, Any]]) -> list[Step]:
    return [step(entry) for entry in trace]


def step(entry: Mapping[str, Any]) -> Step:
    if released := entry.get("released"):
        why = f"{held_work.reason(released['why'], released['use'])}, with priority {released['priority']}"
        return Step(entry, why, held=duration(released["held_s"]))
    seen, policy = entry.get("seen") or (), entry.get("policy", "")
    names = list(dict.fromkeys(name for candidate in seen for name in candidate.get("parts") or {}))
    candidates = [
        dict(candidate)
        | {
            "chosen": candidate["instance"] == entry.get("instance"),
            "room": _room(candidate),
            "score": _score(policy, candidate.get("score"), names),
            "parts": [_part(name, candidate.get("parts") or {}) for name in names],
        }
        for candidate in seen
    ]
    columns = tuple(PART_TITLES.get(name, name.replace("_", " ").capitalize()) for name in names)
    return Step(entry, candidates=candidates, columns=columns)


def _room(candidate: Mapping[str, Any]) -> str:
    if not candidate.get("accepting", True):
        return "takes no work"
    return "yes" if candidate.get("room", True) else "full"


def _part(name: str, parts: Mapping[str, float]) -> str:
    value = parts.get(name)
    return NONE if value is None else part_text(name, value)


def _score(policy: str, score: float | None, names: Sequence[str]) -> str:
    if score is None:
        return NONE
    if any(name.endswith("_s") for name in names):
        return seconds(score)
    return percent(score) if policy == "minimum_use" else quantity(score) if score >= 10_000 else count(score)


def why_not_judged(row: LedgerRow) -> str:
    """Why *row* has no verdict on its SLO; empty where it has one."""
    if row.slo_met is not None:
        return ""
    if row.outcome == Outcome.CANCELLED:
        return "cancelled by the caller"
    if row.outcome != Outcome.DONE:
        return "the request itself was at fault"
    if row.ttft_ms is None:
        return "not streamed, so its first token is not known"
    return "the class has no target"


def predicted(row: LedgerRow) -> Predicted | None:
    """Return the predicted length of *row*, from the ledger and, where there is one, its trace."""
    length: dict[str, Any] = next((entry["length"] for entry in row.trace if entry.get("length")), {})
    tokens = row.predicted_output_tokens or length.get("tokens")
    if not tokens:
        return None
    real = row.output_tokens if row.outcome == "done" else None
    upper = length.get("upper_tokens")
    if upper is not None and tokens < length.get("tokens", 0):
        upper = tokens  # no more had room in the model's context
    return Predicted(tokens, upper, length.get("source", ""), WHY_PRIOR.get(length.get("why", ""), ""), real)
