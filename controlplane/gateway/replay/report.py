"""The key of a replay, the comparison of its answers with the ledger, and the final report."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.db.models import Count, Q, Sum
from rich.console import Console
from rich.table import Table

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.accounts.services import create_api_key
from controlplane.fleet.models import SloClass
from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.replay.sender import LATE_S, Answer, Tally

ACTOR = "manage.py replay"
POLL_S = 0.2
PATIENCE_S = 15.0  # with the ledger, which is written in batches


class TenantError(ValueError):
    """There is no tenant to send as; the text gives the remedy."""


def key_for_run(tenant_name: str, run: str) -> tuple[ApiKey, str]:
    """Create a key of the tenant; return it and its secret. Raises TenantError if there is no such tenant."""
    tenants = Tenant.objects.filter(active=True)
    tenant = tenants.filter(name=tenant_name).first()
    if tenant is None:
        names = ", ".join(tenants.values_list("name", flat=True)) or "none"
        raise TenantError(
            f"There is no active tenant {tenant_name!r} here (there are: {names}); give --tenant or --key."
        )
    return create_api_key(tenant, run, ACTOR)


def known_key(secret: str) -> ApiKey | None:
    """Return the row of *secret*, if this is the database of the server that accepts it."""
    return ApiKey.objects.select_related("tenant").filter(sha256=hash_secret(secret)).first()


def terms_of(key: ApiKey, slo_class: str) -> SloTerms | None:
    """Return the targets by which requests of *key* in *slo_class* (empty: the tenant's default) are judged."""
    row = SloClass.objects.filter(name=slo_class).first() if slo_class else key.tenant.default_slo_class
    return SloTerms.of(row) if row else None


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts of one side: sent and answered, or in the ledger."""

    requests: int
    done: int
    prompt_tokens: int  # of completed requests
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts of both sides."""

    sender: Sums
    ledger: Sums

    @property
    def equal(self) -> bool:
        return self.sender == self.ledger

    def as_json(self) -> dict[str, Any]:
        names = Sums.__slots__
        return {
            "equal": self.equal,
            "sender": {name: getattr(self.sender, name) for name in names},
            "ledger": {name: getattr(self.ledger, name) for name in names},
        }

    def table(self) -> Table:
        table = Table("counts", "sender", "ledger", "")
        for name in Sums.__slots__:
            ours, theirs = getattr(self.sender, name), getattr(self.ledger, name)
            mark = "equal" if ours == theirs else f"differs by {theirs - ours:+,}"
            label = {"requests": "requests sent / rows"}.get(name, name.replace("_", " "))
            table.add_row(label, f"{ours:,}", f"{theirs:,}", mark, style=None if ours == theirs else "bold red")
        return table


def ledger_sums(run: str) -> Sums:
    done = Q(outcome=Outcome.DONE)
    sums = LedgerRow.objects.filter(request_id__startswith=f"{run}-").aggregate(
        requests=Count("pk"),
        done=Count("pk", filter=done),
        prompt_tokens=Sum("prompt_tokens", filter=done, default=0),
        output_tokens=Sum("output_tokens", filter=done, default=0),
    )
    return Sums(**sums)


def compare(run: str, sender: Sums, *, sleep: Callable[[float], None] = time.sleep) -> Comparison:
    """Compare with the ledger, once it has every row or `PATIENCE_S` has passed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        comparison = Comparison(sender, ledger_sums(run))
        if comparison.ledger.requests >= sender.requests or time.monotonic() > deadline:
            return comparison
        sleep(POLL_S)


PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Report:
    """The report at the end of a run."""

    run: str
    model: str
    took_s: float
    tally: Tally
    terms: SloTerms | None = None
    ledger: Comparison | None = None
    interrupted: bool = False

    @property
    def balanced(self) -> bool:
        """Whether every request sent is accounted for, here and (if checked) in the ledger."""
        tally = self.tally
        return tally.sent == tally.done + tally.failed.total() and (self.ledger is None or self.ledger.equal)

    @property
    def slo_met(self) -> tuple[int, int] | None:
        """Return (met, judged) over the completed requests; None when the class has no targets or is unknown."""
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
    """Return (prompt, output) tokens of the completed requests, by their answers."""
    done = [answer for answer in answers if answer.done]
    return sum(answer.prompt_tokens for answer in done), sum(answer.output_tokens for answer in done)


def latencies(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """Return the times of the completed requests, by name."""
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
