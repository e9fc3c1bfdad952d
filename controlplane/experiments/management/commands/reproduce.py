import json
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controlplane.experiments.experiment import Comparison, Experiment, Result, figure
from controlplane.experiments.registry import EXPERIMENTS

WIDTH = 170  # where no terminal says otherwise


class Command(BaseCommand):
    help = "Run a paper's experiment in our simulator and compare. docs/experiments.md lists all."

    def add_arguments(self, parser: CommandParser) -> None:
        experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
        for experiment in EXPERIMENTS.values():
            about = f"{experiment.paper}, {experiment.section}: {experiment.measures}"
            own = experiments.add_parser(experiment.name, help=about, description=about)
            groups: dict[str, Any] = {}
            for option in experiment.options:
                if option.group and option.group not in groups:
                    groups[option.group] = own.add_mutually_exclusive_group()
                option.add_to(groups[option.group] if option.group else own)
            own.add_argument("--out", type=Path, help="file for the result as JSON")
            own.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        experiment = EXPERIMENTS[options["experiment"]]
        try:
            result = self._run(experiment, options)
            if options["out"]:
                options["out"].parent.mkdir(parents=True, exist_ok=True)
                options["out"].write_text(json.dumps(result, indent=1), encoding="utf-8")
        except (ValueError, RuntimeError, OSError) as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(result))
            return
        console = Console(file=cast(TextIO, self.stdout), width=None if sys.stdout.isatty() else WIDTH)
        experiment.show(console, result)
        if rows := experiment.compare(result):
            console.print(comparison_table(experiment, rows))

    @staticmethod
    def _run(experiment: Experiment, options: dict[str, Any]) -> Result:
        settings = experiment.settings(options)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        console = Console(stderr=True, quiet=options["json"])
        with Progress(*columns, console=console, refresh_per_second=4) as progress:
            bars: dict[str, Any] = {}

            def report(step: str, done: int, total: int) -> None:
                if step not in bars:
                    for bar in bars.values():
                        progress.update(bar, visible=False)
                    bars[step] = progress.add_task(step, total=total)
                progress.update(bars[step], completed=done)

            return experiment.run(settings, report)


def comparison_table(experiment: Experiment, rows: list[Comparison]) -> Table:
    """The paper's figures beside ours."""
    table = Table(title=f"Against the paper: {experiment.paper}")
    for head in ("Measure", "Section"):
        table.add_column(head)
    for head in ("Paper", "Ours"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(row.measure, row.section, figure(row.paper, row.unit), figure(row.ours, row.unit))
    return table
