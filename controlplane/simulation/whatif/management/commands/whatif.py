import json
import time
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif import selectors, services, working
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import WhatIf
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from controlplane.terminal import Column, console, progress, table
from scheduling.simulation.scenario import ScenarioError
from scheduling.simulation.scenario.file import read_toml

ACTOR = "command line"
LOOK_S = 0.5
LOOK_AFTER_S = 5.0
"""Interval in seconds; each pass messages workers about all waiting runs, so shorter ones would flood them."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


class Command(BaseCommand):
    help = (
        "Ask a what-if, watch it, and print its futures side by side: of the living fleet, or of a file with the body that"
        " POST /api/what-ifs takes. With a number, follow and print one that was asked before. Ctrl-C leaves it to workers."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "what_if", nargs="?", help="number of a what-if, or a JSON file of one; none: --preset, --scenario"
        )
        parser.add_argument("--scenario", type=Path, help="start from this scenario file instead of the living fleet")
        parser.add_argument(
            "--preset",
            action="append",
            default=[],
            choices=sorted(PRESETS),
            help="a future; may be given up to five times",
        )
        parser.add_argument("--demand", type=float, default=1.0, help="factor on the demand of all futures")
        parser.add_argument("--horizon", type=float, default=3600.0, metavar="S", help="seconds (default %(default)g)")
        parser.add_argument("--seeds", type=int, default=5, help="default %(default)d")
        parser.add_argument("--cancel", type=int, metavar="N", help="cancel what-if N; what is done stays")
        parser.add_argument(
            "--resume",
            type=int,
            metavar="N",
            help="run what of what-if N was cancelled, failed or interrupted, and follow it",
        )
        parser.add_argument(
            "--future", default="", metavar="LETTER", help="of --cancel and --resume; all, if it is left out"
        )
        parser.add_argument("--here", action="store_true", help="run in this process, not by the Celery workers")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        given = options["what_if"] or ""
        try:
            if options["cancel"] is not None:
                self._cancel(self._known(options["cancel"]), options)
                return
            if options["resume"] is not None:
                row = services.resume(self._known(options["resume"]), ACTOR, options["future"])
            else:
                row = self._known(int(given)) if given.isdigit() else self._asked(given, options)
        except (ActionError, ScenarioError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error
        except ValidationError as error:
            raise CommandError(
                "; ".join(f"{name}: {' '.join(each)}" for name, each in error.message_dict.items())
            ) from error
        try:
            self._watch(row, options["here"], options["json"])
        except KeyboardInterrupt:
            self.stderr.write(
                f"What-if {row.pk} continues where workers run. `manage.py whatif {row.pk}` follows it again, --here makes"
                f" its runs, and `manage.py whatif --cancel {row.pk}` cancels it."
            )
            raise SystemExit(INTERRUPTED) from None
        row.refresh_from_db()
        made = selectors.comparison(row)
        if options["json"]:
            answer = {"id": row.pk, "state": row.state, **made}
            self.stdout.write(json.dumps(answer))
            return
        show(console(self.stdout), row, made)

    def _known(self, pk: int) -> WhatIf:
        row = selectors.what_if(pk)
        if row is None:
            raise CommandError(f"There is no what-if {pk}.")
        return row

    def _cancel(self, row: WhatIf, options: dict[str, Any]) -> None:
        row = services.cancel(row, ACTOR, letter=options["future"])
        seen = selectors.progress(row.pk)
        assert seen is not None
        if options["json"]:
            self.stdout.write(json.dumps({"id": row.pk, **seen}))
            return
        what = f"Future {options['future']} of what-if" if options["future"] else "What-if"
        kept = f"{seen['runs_done']} of {seen['runs']} runs are kept"
        self.stdout.write(f"{what} {row.pk} is cancelled; {kept}. `manage.py whatif --resume {row.pk}` runs the rest.")

    def _asked(self, file: str, options: dict[str, Any]) -> WhatIf:
        body: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
        begin = Begin.model_validate(body.pop("begin", {}))
        if options["scenario"]:
            begin = Begin(kind="synthetic", scenario=read_toml(options["scenario"]))
        edits = body.pop("edits", [])
        if options["demand"] != 1.0:
            edits.append({"kind": "demand", "edit": "factor", "by": options["demand"]})
        horizon_s = float(body.setdefault("horizon_s", options["horizon"]))
        futures = [
            services.future_of(each.get("name", ""), each.get("preset", ""), each.get("changes", []))
            for each in [*body.pop("futures", []), *({"preset": name} for name in options["preset"])]
        ]
        values = {"title": "From the command line", "seeds": options["seeds"], **body, "edits": edits}
        values["start"] = start_of(begin, horizon_s).model_dump(mode="json")
        return services.ask(values, futures, ACTOR)

    def _watch(self, row: WhatIf, here: bool, quiet: bool) -> None:
        """Wait for its end under a progress bar, or run it here."""
        looks_s = time.monotonic() + LOOK_AFTER_S
        with progress(quiet) as report:
            while True:
                seen = selectors.progress(row.pk)
                assert seen is not None
                report(row.title, int(1000 * seen["done"]), 1000)
                if seen["state"] not in working.OPEN:
                    return
                if here and working.work() is not None:
                    continue
                time.sleep(LOOK_S)
                if time.monotonic() >= looks_s:
                    working.supervise(timezone.now())  # without Celery beat, this command supervises
                    looks_s = time.monotonic() + LOOK_AFTER_S


def show(out: Any, row: WhatIf, made: dict[str, Any]) -> None:
    """Print the comparison."""

    def mean(name: str) -> Any:
        return lambda each: each[name]["mean"] if each[name] else None

    def interval(each: dict[str, Any]) -> str:
        slo = each["slo_met"]
        return f"{100 * slo['low']:.2f} to {100 * slo['high']:.2f}" if slo else "-"

    columns = [
        Column("", "letter"),
        Column("Future", "name"),
        Column("Changes", lambda each: "; ".join(each["changes"]) or "no change"),
        Column("SLO met", mean("slo_met"), "{:.2%}"),
        Column("95%", interval),
        *(Column(title, mean(name), form) for name, (title, form) in selectors.SHOWN.items()),
        Column("Verdict", "verdict"),
    ]
    shared = "; ".join(selectors.edits_in_words(row))
    title = (
        f"What-if {row.pk}, {row.title}: {row.horizon_s / 3600:g} h, {row.seeds} seeds{f', {shared}' if shared else ''}"
    )
    out.print(table(title, columns, made["futures"]))
    for each in made["futures"]:
        if each["first_difference"]:
            out.print(f"{each['letter']}: {each['first_difference']}")
