"""The closing report of a replay: as a table for people, as one JSON object for programs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.replay.client import Answer
from controlplane.gateway.replay.ledger_check import Comparison
from controlplane.gateway.replay.sender import LATE_S, Tally

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is said at the end of a run."""

    run: str
    model: str
    took_s: float
    tally: Tally
    terms: SloTerms | None = None
    ledger: Comparison | None = None
    interrupted: bool = False

    @property
    def balanced(self) -> bool:
        """Whether every request sent is accounted for, here and (if it was looked at) in the ledger."""
        tally = self.tally
        return tally.sent == tally.done + tally.failed.total() and (self.ledger is None or self.ledger.equal)

    @property
    def slo_met(self) -> tuple[int, int] | None:
        """(met, judged) over the requests that were done; None when the class has no targets or is not known."""
        if self.terms is None:
            return None
        verdicts = [self.terms.met(a.ttft_ms, a.itl_ms, a.e2e_ms) for a in self.tally.answers if a.done and a.e2e_ms]
        judged = [verdict for verdict in verdicts if verdict is not None]
        return (sum(judged), len(judged)) if judged else None

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        prompt_tokens, output_tokens = tokens(tally.answers)
        met = self.slo_met
        return {
            "run": self.run,
            "model": self.model,
            "took_s": round(self.took_s, 3),
            "interrupted": self.interrupted,
            "sent": tally.sent,
            "done": tally.done,
            "failed": tally.failed.total(),
            "failures": dict(tally.failed),
            "skipped": dict(tally.skipped),
            "clipped": tally.clipped,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            **{name: quantiles(values) for name, values in latencies(tally.answers).items()},
            "slo_class": self.terms.name if self.terms else None,
            "slo_met": met[0] if met else None,
            "slo_judged": met[1] if met else None,
            "late": tally.late,
            "latest_s": round(tally.latest_s, 3),
            "most_open": tally.most_open,
            "ledger": self.ledger.as_json() if self.ledger else None,
            "balanced": self.balanced,
        }

    def show(self, console: Console) -> None:
        tally = self.tally
        console.print(self._counts())
        console.print(self._latencies())
        if tally.late:
            console.print(
                f"[yellow]{tally.late} requests went out more than {LATE_S * 1000:.0f} ms late, "
                f"the latest {tally.latest_s:.1f} s: lower --speed or raise --connections.[/]"
            )
        if self.ledger is not None:
            console.print(self.ledger.table())
        verdict = f"sent {tally.sent} = done {tally.done} + failed {tally.failed.total()}"
        if self.ledger is None:
            console.print(f"{verdict}; the ledger was not compared.")
        else:
            equal = "the ledger holds the same." if self.ledger.equal else "THE LEDGER DOES NOT HOLD THE SAME."
            console.print(f"{verdict}; {equal}")

    def _counts(self) -> Table:
        tally = self.tally
        prompt_tokens, output_tokens = tokens(tally.answers)
        table = Table(title=f"{self.run}: {self.model}, {self.took_s:.0f} s", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("sent", f"{tally.sent:,}")
        table.add_row("done", f"{tally.done:,}")
        table.add_row("failed", f"{tally.failed.total():,}")
        for reason, count in tally.failed.most_common():
            table.add_row(f"  {reason}", f"{count:,}", style="red")
        for reason, count in tally.skipped.most_common():
            table.add_row(f"not sent: {reason}", f"{count:,}", style="yellow")
        if tally.clipped:
            table.add_row("shortened to the model's context", f"{tally.clipped:,}", style="yellow")
        table.add_row("prompt tokens", f"{prompt_tokens:,}")
        table.add_row("output tokens", f"{output_tokens:,}")
        table.add_row("most at one time", f"{tally.most_open:,}")
        if met := self.slo_met:
            assert self.terms is not None
            table.add_row(f"SLO met ({self.terms.name})", f"{met[0]:,} of {met[1]:,} ({met[0] / met[1]:.1%})")
        else:
            why = f"{self.terms.name} has no targets" if self.terms else "class not known here"
            table.add_row("SLO met", why)
        return table

    def _latencies(self) -> Table:
        table = Table("of requests done", *(f"p{percentile}" for percentile in PERCENTILES))
        names = {
            "ttft_ms": "time to first token (TTFT)",
            "itl_ms": "inter-token latency, mean (ITL)",
            "e2e_ms": "end to end (E2E)",
        }
        for name, values in latencies(self.tally.answers).items():
            shown = quantiles(values)
            table.add_row(names[name], *(f"{value:,.1f} ms" if value is not None else "-" for value in shown.values()))
        return table


def tokens(answers: Iterable[Answer]) -> tuple[int, int]:
    """(prompt, output) tokens of the requests that were done, as their answers said."""
    done = [answer for answer in answers if answer.done]
    return sum(answer.prompt_tokens for answer in done), sum(answer.output_tokens for answer in done)


def latencies(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """Times of the requests that were done, by name."""
    done = [answer for answer in answers if answer.done]
    return {
        name: [value for answer in done if (value := getattr(answer, name)) is not None]
        for name in ("ttft_ms", "itl_ms", "e2e_ms")
    }


def quantiles(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {f"p{percentile}": None for percentile in PERCENTILES}
    values_ms = np.percentile(values, PERCENTILES)
    return {f"p{percentile}": round(float(value), 3) for percentile, value in zip(PERCENTILES, values_ms, strict=True)}
