import asyncio
import json
import secrets
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.model_task import Task
from scheduling.simulation.workload.traces import FORMATS, UNITS, TraceError, read_trace, unit_of
from workers.traffic.replay import Replay

ACTOR = "manage.py replay"
LEDGER_S = 15.0
"""Longest wait for rows of the ledger, which are written in batches."""


class Command(BaseCommand):
    help = "Send a real trace through the gateway at its own pace, then account for every request."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, help="the trace; `.gz` is unpacked on the way")
        parser.add_argument("--format", required=True, choices=FORMATS)
        parser.add_argument("--unit", default="", choices=UNITS, help="of times in mooncake's format that are numbers")
        parser.add_argument("--speed", type=float, default=1.0, help="times faster than it was recorded (default 1)")
        parser.add_argument("--url", default=f"{settings.CONSOLE_URL}/v1", help="the gateway (default %(default)s)")
        parser.add_argument("--key", help="API key; without one, a key is made for the run and revoked after it")
        parser.add_argument("--tenant", default="acme", help="whose key is made (default %(default)s)")
        parser.add_argument("--model", help="default: the one with the longest context")
        parser.add_argument("--slo-class", default="", help="default: the tenant's")
        parser.add_argument("--region", default="", help="the callers' region")
        parser.add_argument("--limit", type=int, help="only the first so many requests")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["speed"] <= 0:
            raise CommandError("--speed must be more than 0.")
        run = f"replay-{secrets.token_hex(4)}"
        made, secret = (None, options["key"]) if options["key"] else new_key(options["tenant"], run)
        try:
            report, interrupted = self._replay(options, run, secret)
        finally:
            if made is not None:
                revoke_api_key(made, ACTOR, f"{run} is over")
        balanced = True
        if made is not None:
            report["ledger"] = ledger_of(run, report["sent"])
            balanced = report["ledger"] == {name: report[name] for name in ("sent", "done")}
        self.stdout.write(json.dumps(report, indent=2))
        if interrupted or not balanced:
            self.stderr.write("Interrupted." if interrupted else "The ledger does not hold the same.")
            sys.exit(130 if interrupted else 1)

    def _replay(self, options: dict[str, Any], run: str, secret: str) -> tuple[dict[str, Any], bool]:
        url, interrupted = options["url"].rstrip("/"), False
        model, context_tokens = asyncio.run(choose_model(url, secret, options["model"]))
        headers = {"Authorization": f"Bearer {secret}"}
        headers |= {"X-SLO-Class": options["slo_class"]} if options["slo_class"] else {}
        headers |= {"X-Region": options["region"]} if options["region"] else {}
        replay = Replay(url, model, run, headers, context_tokens, options["speed"])
        try:
            unit = options["unit"] or unit_of(options["file"], options["format"])
        except TraceError as error:
            raise CommandError(str(error)) from error
        self.stderr.write(f"{run} to {model}. Times that are numbers are read as {unit}.")
        requests = read_trace(options["file"], options["format"], unit=unit)
        began_s = time.monotonic()
        try:
            asyncio.run(replay.send(islice(requests, options["limit"])))
        except KeyboardInterrupt:
            interrupted = True
        if replay.mistake and not replay.answers:
            raise CommandError(replay.mistake)
        if replay.mistake:
            self.stderr.write(f"{replay.mistake}\nThe requests above it were sent:")
        return replay.report() | {"took_s": round(time.monotonic() - began_s, 1)}, interrupted


def new_key(name: str, run: str) -> tuple[ApiKey, str]:
    """Create a key of the tenant *name*. Raises CommandError in one line."""
    try:
        tenant = Tenant.objects.filter(active=True, name=name).first()
        if tenant is None:
            raise CommandError(f"There is no active tenant {name!r} here; give --tenant or --key.")
        return create_api_key(tenant, run, ACTOR)
    except DatabaseError as error:
        raise CommandError(f"No key can be made ({error}); give --key.") from error


def ledger_of(run: str, sent: int) -> dict[str, int]:
    """Return the numbers of rows and of done rows of *run*, once all *sent* are written or `LEDGER_S` are over."""
    rows, until_s = LedgerRow.objects.filter(request_id__startswith=f"{run}-"), time.monotonic() + LEDGER_S
    while rows.count() < sent and time.monotonic() < until_s:
        time.sleep(0.2)
    return {"sent": rows.count(), "done": rows.filter(outcome=Outcome.DONE).count()}


async def choose_model(url: str, key: str, wanted: str | None) -> tuple[str, int]:
    """Return name and context of the *wanted* model, or of the one with the longest context. Raises CommandError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}) as response,
        ):
            answer = await response.json(content_type=None)
            if response.status != 200:
                raise CommandError(f"{url}/models: {response.status} {answer.get('error', {}).get('message', '')}")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"The gateway at {url} does not answer ({reason}). Is Pilothouse running there?") from error
    cards = [card for card in answer["data"] if card.get("task", Task.GENERATE) == Task.GENERATE]
    models = {card["id"]: card.get("max_model_len") or 0 for card in cards}
    if not models or (wanted and wanted not in models):
        raise CommandError(f"{url} serves no {wanted or 'model'}; it serves: {', '.join(models) or 'nothing yet'}.")
    name = wanted or min(models, key=lambda name: (-models[name], name))
    return name, models[name]
