import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console

from controlplane.experiments.experiment import SEEDS, Experiment, Result, Settings, figure
from controlplane.experiments.registry import EXPERIMENTS
from controlplane.terminal import Column, console, progress, table
from forecasting.models_extra import ModelsExtraMissing


class Command(BaseCommand):
    help = "Run a paper's experiment in our simulator and compare. docs/papers/experiments.md lists all."
    requires_system_checks = []

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
        except ModelsExtraMissing as error:
            raise CommandError(str(error), returncode=2) from error
        except (ValueError, RuntimeError, OSError) as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(result))
            return
        show(experiment, result, console(self.stdout))

    @staticmethod
    def _run(experiment: Experiment, options: dict[str, Any]) -> Result:
        settings = experiment.settings(options)
        experiment.check_installed(settings)
        with progress(quiet=options["json"]) as report:
            return {"command": command_line(experiment, settings), **experiment.measure(settings, report)}


def command_line(experiment: Experiment, settings: Settings) -> str:
    """Return the command with those of *settings* that differ from the defaults."""
    words, usual = ["manage.py", "reproduce", experiment.name], experiment.settings({})
    for option in experiment.options:
        value = settings[option.key]
        if value != usual[option.key]:
            words.append(f"--{option.name}")
            if not option.flag:
                words.append(
                    ",".join(value) if option.several else f"{value:g}" if option.type is float else str(value)
                )
    return " ".join(words)


def show(experiment: Experiment, result: Result, shown: Console) -> None:
    """Print *result*, and the paper's figures with ours if it has any."""
    experiment.show(shown, result)
    if SEEDS in experiment.options and result.get("seeds", 1) > 1:
        shown.print(f"Means over {result['seeds']} seeds.")
    if rows := [each for each in experiment.compare(result) if each.ours is not None]:
        shown.print(table(f"Against the paper: {experiment.paper}", COMPARED, map(asdict, rows)))


COMPARED = (
    Column("Measure", "measure"),
    Column("Section", "section"),
    Column("Paper", lambda row: figure(row["paper"], row["unit"]), "{}"),
    Column("Ours", lambda row: figure(row["ours"], row["unit"]), "{}"),
    Column("Simplest rule", lambda row: "-" if row["simplest"] is None else figure(row["simplest"], row["unit"]), "{}"),
)
