"""A replay beside the server's database: a key for the run, and the comparison of its answers with the ledger."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q, Sum
from rich.table import Table

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.accounts.services import create_api_key
from controlplane.fleet.models import SloClass
from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.models import LedgerRow, Outcome

ACTOR = "manage.py replay"
POLL_S = 0.2
PATIENCE_S = 15.0  # with the ledger, which is written in batches


class TenantError(ValueError):
    """There is no tenant to send as; the text says what to do."""


def key_for_run(tenant_name: str, run: str) -> tuple[ApiKey, str]:
    """A new key of the tenant, and its secret. Raises TenantError if the name says none."""
    tenants = Tenant.objects.filter(active=True)
    tenant = tenants.filter(name=tenant_name).first()
    if tenant is None:
        names = ", ".join(tenants.values_list("name", flat=True)) or "none"
        raise TenantError(
            f"There is no active tenant {tenant_name!r} here (there are: {names}); give --tenant or --key."
        )
    return create_api_key(tenant, run, ACTOR)


def known_key(secret: str) -> ApiKey | None:
    """The row behind *secret*, if this is the database of the server that accepts it."""
    return ApiKey.objects.select_related("tenant").filter(sha256=hash_secret(secret)).first()


def terms_of(key: ApiKey, slo_class: str) -> SloTerms | None:
    """The targets that requests of *key* in *slo_class* (empty: the tenant's default) are judged by."""
    row = SloClass.objects.filter(name=slo_class).first() if slo_class else key.tenant.default_slo_class
    return SloTerms.of(row) if row else None


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts of one side: what was sent and answered, or what the ledger has."""

    requests: int
    done: int
    prompt_tokens: int  # of requests done
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides."""

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
