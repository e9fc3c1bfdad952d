import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controlplane.accounts.models import ApiKey
from controlplane.accounts.services import revoke_api_key
from controlplane.gateway.replay import report as reports
from controlplane.gateway.replay.report import Report, tokens
from controlplane.gateway.replay.sender import Sender, Tally, Target
from scheduling.model_task import Task
from scheduling.simulation.workload.traces import FORMATS, UNITS, TraceError, TraceRequest, read_trace, unit_of

REFRESH_S = 0.25


class Command(BaseCommand):
    help = "Send a real trace through the gateway at its own pace, then say what came of it and check the ledger."
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
        parser.add_argument(
            "--clip", action="store_true", help="shorten requests to the model's context, not leave them out"
        )
        parser.add_argument("--connections", type=int, default=2000, help="open requests at most (default %(default)s)")
        parser.add_argument("--seed", type=int, default=0, help="of prompts, and of arrivals drawn from rates")
        parser.add_argument("--no-check-ledger", action="store_true", help="do not compare with the ledger")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["speed"] <= 0 or options["connections"] < 1:
            raise CommandError("--speed and --connections must be more than 0.")
        run = f"replay-{secrets.token_hex(4)}"
        try:
            key, made = self._key(options, run)
        except reports.TenantError as error:
            raise CommandError(str(error)) from error
        try:
            report = self._replay(options, run, made or options["key"], key)
        finally:
            if key is not None and made:
                revoke_api_key(key, reports.ACTOR, f"{run} is over")
        if options["json"]:
            self.stdout.write(json.dumps(report.as_json()))
        else:
            report.show(Console())
        if report.interrupted:
            sys.exit(130)
        if not report.balanced:
            sys.exit(1)

    def _key(self, options: dict[str, Any], run: str) -> tuple[ApiKey | None, str]:
        """Return (row if this is the server's database, secret if the key was made for this run)."""
        try:
            if options["key"]:
                return reports.known_key(options["key"]), ""
            return reports.key_for_run(options["tenant"], run)
        except DatabaseError as error:
            if options["key"]:
                return None, ""
            raise CommandError(f"No key can be made ({error}); give --key.") from error

    def _replay(self, options: dict[str, Any], run: str, secret: str, key: ApiKey | None) -> Report:
        url = options["url"].rstrip("/")
        model = asyncio.run(choose_model(url, secret, options["model"]))
        target = Target(url, secret, model.name, model.context_tokens, options["slo_class"], options["region"])
        sender = Sender(
            target,
            run,
            speed=options["speed"],
            clip=options["clip"],
            connections=options["connections"],
            seed=options["seed"],
        )
        try:
            unit = options["unit"] or unit_of(options["file"], options["format"])
        except TraceError as error:
            raise CommandError(str(error)) from error
        requests = read_trace(options["file"], options["format"], seed=options["seed"], unit=unit)
        requests = islice(requests, options["limit"])
        if not options["json"]:
            self.stderr.write(f"Times that are numbers are read as {unit}.")
        total = count_requests(options["file"], options["format"], options["limit"])
        console = Console(stderr=True, quiet=options["json"])
        began = time.monotonic()
        wrong = ""
        interrupted = False
        try:
            interrupted = asyncio.run(send(sender, requests, total, console))
        except TraceError as error:
            wrong = str(error)
        took_s = time.monotonic() - began
        if wrong and not sender.tally.sent:
            raise CommandError(wrong)
        if wrong:
            self.stderr.write(f"{wrong}\nThe requests above it were sent:")
        comparison = None
        if key is not None and not options["no_check_ledger"]:
            tally = sender.tally
            comparison = reports.compare(run, reports.Sums(tally.sent, tally.done, *tokens(tally.answers)))
        terms = reports.terms_of(key, options["slo_class"]) if key is not None else None
        return Report(run, model.name, took_s, sender.tally, terms, comparison, interrupted)


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    context_tokens: int  # 0 if the server does not report it


async def choose_model(url: str, key: str, wanted: str | None) -> ServedModel:
    """Return the *wanted* model, or the one with the longest context (first by name). Raises CommandError in one line."""
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
    models = [ServedModel(card["id"], card.get("max_model_len") or 0) for card in cards]
    if wanted:
        models = [model for model in models if model.name == wanted]
        if not models:
            names = ", ".join(card["id"] for card in cards)
            raise CommandError(f"{url} does not serve {wanted!r}; it serves: {names}.")
    if not models:
        raise CommandError(f"{url} serves no model yet.")
    return min(models, key=lambda model: (-model.context_tokens, model.name))


def count_requests(path: Path, trace_format: str, limit: int | None) -> int | None:
    """Return the number of requests in the trace, for the bar; None if that takes more than counting lines."""
    if trace_format == "servegen" or path.suffix == ".gz":
        return limit
    header = trace_format != "mooncake"
    try:
        with path.open("rb") as file:
            lines = sum(bool(line.strip()) for line in file) - header
    except OSError:
        return limit
    return lines if limit is None else min(lines, limit)


async def send(sender: Sender, requests: Iterator[TraceRequest], total: int | None, console: Console) -> bool:
    """Run *sender* under a progress bar; return whether it was interrupted (Ctrl-C, SIGTERM)."""
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        sender.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task(sender.target.model, total=total, counts="")
        showing = asyncio.create_task(_show(progress, bar, sender.tally))
        try:
            await sender.run(requests)
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing
            _update(progress, bar, sender.tally)
    return interrupted


async def _show(progress: Progress, bar: Any, tally: Tally) -> None:
    while True:
        _update(progress, bar, tally)
        await asyncio.sleep(REFRESH_S)


def _update(progress: Progress, bar: Any, tally: Tally) -> None:
    failed = tally.failed.total()
    late = f", {tally.late} late" if tally.late else ""
    handled = len(tally.answers) + tally.skipped.total()
    progress.update(bar, completed=handled, counts=f"{tally.open} open, {failed} failed{late}")
