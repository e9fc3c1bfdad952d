"""`manage.py usage_sums [DAY] [--tenant NAME]`: the sums of one day, by each thing that usage can be grouped by."""

from argparse import ArgumentParser
from datetime import date, datetime, time, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.usage.selectors import UsageScope, summed, usage, zone_of

GROUPS = ("tenant", "key", "model", "slo_class", "work", "gpu_type", "application", "batch", "instance", "day", "hour")
INTS, DOLLARS = ("requests", "prompt_tokens", "output_tokens"), ("gpu_s", "cost_usd", "charged_usd")


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("day", nargs="?", type=date.fromisoformat, help="such as 2026-11-28; by default today")
        parser.add_argument("--tenant", default="", help="of one tenant, in its time zone")

    def handle(self, *args: Any, day: date | None, tenant: str, **options: Any) -> None:
        tenants = Tenant.objects.filter(name=tenant) if tenant else None
        if tenants is not None and not tenants.exists():
            raise CommandError(f"There is no tenant {tenant!r}.")
        zone = zone_of(tenants, "")
        day = day or timezone.now().astimezone(zone).date()
        since, until = (datetime.combine(day + timedelta(days=more), time(), zone) for more in (0, 1))
        asked = UsageScope(since, until, tenants, zone=zone)
        self.stdout.write(f"{day} in {zone}, {tenant or 'the fleet'}; of which idle stands below")
        self.stdout.write(f"{'by':<12}{'lines':>6}{'requests':>10}{'prompt':>12}{'output':>12}{'GPU-h':>10}{'cost':>12}"
                          f"{'charged':>12}")  # fmt: skip
        for group in GROUPS:
            if group != "instance" or tenants is None:
                rows = list(map(summed, usage(asked, (group,))))
                self._line(group, rows)
        self._line("idle", [row for row in map(summed, usage(asked)) if row["idle"]])

    def _line(self, name: str, rows: list[dict[str, Any]]) -> None:
        whole = [sum(row[column] for row in rows) for column in INTS + DOLLARS]
        requests, prompt, output, gpu_s, cost, charged = whole
        self.stdout.write(
            f"{name:<12}{len(rows):>6}{requests:>10,}{prompt:>12,}{output:>12,}{gpu_s / 3600:>10.4f}{cost:>12.4f}"
            f"{charged:>12.4f}"
        )
