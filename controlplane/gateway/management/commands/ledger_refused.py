import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from controlplane.gateway.ledger import refused
from controlplane.gateway.ledger.entry import COLUMNS, RequestRecord
from controlplane.gateway.ledger.refused import Refused
from controlplane.gateway.ledger.writer import write_each


class Command(BaseCommand):
    help = (
        "List the ledger rows that the database refused; mend them with --set, write them with --add, or give them up."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("request_id", nargs="*", help="only rows of these requests (default: all)")
        parser.add_argument(
            "--set", action="append", default=[], type=_assignment, metavar="COLUMN=VALUE",
            help="a value to put in, as JSON or text; again for more columns",
        )  # fmt: skip
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument("--add", action="store_true", help="write them; what is refused again stays quarantined")
        chosen.add_argument("--drop", action="store_true", help="take them away for good")

    def handle(self, *_args: Any, **options: Any) -> None:
        folder = Path(settings.STATE_DIR)
        wanted: list[str] = options["request_id"]
        rows = [one for one in refused.read(folder) if not wanted or one.row.get("request_id") in wanted]
        if missing := set(wanted) - {one.row.get("request_id") for one in rows}:
            raise CommandError(f"No refused row is of {', '.join(sorted(missing))}.")
        mended = [Refused(one.at, one.reason, {**one.row, **dict(options["set"])}) for one in rows]
        if options["drop"]:
            refused.replace(folder, rows)
            self.stdout.write(f"{len(rows)} dropped")
        elif options["add"]:
            self._add(folder, rows, mended)
        else:
            if options["set"]:
                refused.replace(folder, rows, mended)
            self._list(mended)

    def _add(self, folder: Path, rows: list[Refused], mended: list[Refused]) -> None:
        still: list[Refused] = []
        for one in mended:
            try:
                reasons = [reason for _, reason in write_each([RequestRecord(**one.row).bounded()], again=True)]
            except (TypeError, ValueError) as error:
                reasons = [f"{type(error).__name__}: {error}"]
            except DatabaseError as error:
                raise CommandError(f"The database cannot be written: {error}") from None
            still += [Refused(one.at, reason, one.row) for reason in reasons]
        refused.replace(folder, rows, still)
        self.stdout.write(f"{len(rows) - len(still)} added")
        if still:
            self._list(still)
            raise CommandError(f"{len(still)} refused again.")

    def _list(self, rows: list[Refused]) -> None:
        for one in rows:
            at = datetime.fromtimestamp(one.at, UTC)
            self.stdout.write(f"{one.row.get('request_id')}  {at:%Y-%m-%d %H:%M:%S} UTC  {one.reason}")
            self.stdout.write(f"    {json.dumps(one.row)}")
        if not rows:
            self.stdout.write("No row is quarantined.")


def _assignment(text: str) -> tuple[str, Any]:
    """Parse COLUMN=VALUE. Raises argparse.ArgumentTypeError for another form, or an unknown column of the ledger."""
    name, equals, value = text.partition("=")
    if not equals or name not in COLUMNS:
        raise argparse.ArgumentTypeError(f"{text!r} is not COLUMN=VALUE with one of {', '.join(COLUMNS)}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
