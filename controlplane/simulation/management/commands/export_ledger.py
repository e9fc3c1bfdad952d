from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.simulation.selectors import LEDGER_COLUMNS, ledger_rows, ledger_trace
from scheduling.simulation.measures.tables import write_csv


def moment(text: str) -> datetime:
    """Parse a date or a date and time; UTC by default."""
    value = datetime.fromisoformat(text)
    return value if value.tzinfo else value.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = "Write the request ledger as a trace (CSV) that `simulate` and `replay` read with the format `ledger`."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--since", type=moment, help="from this moment on, such as 2026-11-20T08:00")
        parser.add_argument("--until", type=moment, help="before this moment")
        parser.add_argument("--model", default="", help="of this model only")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = ledger_rows(options["since"], options["until"], options["model"])
        count = rows.count()
        if not count:
            raise CommandError("The ledger holds no such request.")
        try:
            write_csv(options["file"], LEDGER_COLUMNS, ledger_trace(rows))
        except OSError as error:
            raise CommandError(f"{options['file']}: {error.strerror}") from error
        self.stdout.write(f"{count} requests written to {options['file']}")
