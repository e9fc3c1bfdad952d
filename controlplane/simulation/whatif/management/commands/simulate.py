import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console

from controlplane.simulation import fitting
from controlplane.simulation.running import Simulated, compile_for, simulate
from controlplane.simulation.whatif.exporting import export
from controlplane.terminal import Column, console, progress, table
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.measures.results import LATENCIES, RUN_COLUMNS, change_table, latency_s, series_table
from scheduling.simulation.measures.tables import write_csv
from scheduling.simulation.scenario import ScenarioError, load_scenario
from scheduling.simulation.staging import stage
from scheduling.table_files import TraceError


def moment(text: str) -> datetime:
    """Parse a date or a date and time; UTC by default."""
    value = datetime.fromisoformat(text)
    return value if value.tzinfo else value.replace(tzinfo=UTC)


CHUNK = 100_000
REQUEST_COLUMNS = (
    "arrival_s", "model", "region", "slo_class", "tenant", "prompt_tokens", "output_tokens", "outcome", "instance",
    "preemptions", "cached_tokens", *(f"{name}_s" for name in LATENCIES),
)  # fmt: skip


class Command(BaseCommand):
    help = (
        "Simulate a scenario file, print its measures, and write them as tables; or export the live fleet as such a file, or"
        " fit performance profiles, with their errors on configurations that were left out."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("scenario", type=Path, nargs="?", help="a TOML file; docs/plan/simulation.md describes it")
        parser.add_argument(
            "--export", type=Path, metavar="FOLDER", help="write the live fleet and its ledger, and end"
        )
        parser.add_argument(
            "--fit",
            choices=fitting.FORMATS,
            help="fit profiles to a file of this format, or to our own ledger, and end",
        )
        parser.add_argument("--write", action="store_true", help="store fits of models and GPU types we have")
        parser.add_argument("--since", type=moment, help="exported requests from then on, such as 2026-11-20T08:00")
        parser.add_argument("--until", type=moment, help="exported requests before then")
        parser.add_argument("--out", type=Path, help="folder for the tables; made if it is not there")
        parser.add_argument("--requests", action="store_true", help="also write a row for every request")
        parser.add_argument("--seed", type=int, help="instead of the scenario's own")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["fit"]:
            self._fit(options)
            return
        if (options["scenario"] is None) == (options["export"] is None):
            raise CommandError("Give a scenario file, or --export FOLDER.")
        if options["export"]:
            try:
                self.stdout.write(export(options["export"], options["since"], options["until"]))
            except (ValueError, OSError) as error:
                raise CommandError(str(error)) from error
            return
        if options["seed"] is not None and options["seed"] < 0:
            raise CommandError("--seed must be at least 0.")
        if options["requests"] and not options["out"]:
            raise CommandError("--requests writes into the folder of --out: give one.")
        path = options["scenario"]
        try:
            scenario = load_scenario(path)
            seed = scenario.seed if options["seed"] is None else options["seed"]
            staged = stage(scenario, path, seed)
        except (ScenarioError, TraceError) as error:
            raise CommandError(str(error)) from error
        try:
            with Console(stderr=True, quiet=options["json"]).status("Compiling, once for each release"):
                compile_for(staged)
            with progress(options["json"]) as report:
                title = scenario.title or "simulating"
                ran = simulate(
                    scenario,
                    staged,
                    path=path,
                    progress=lambda *done: report(title, *done),
                )
                ended = int(np.count_nonzero(ran.result.outcomes["state"] >= Outcome.DONE))
                report(title, ended, staged.requests.count)
        except (ValueError, RuntimeError) as error:
            raise CommandError(str(error) if isinstance(error, ScenarioError) else f"{path}: {error}") from error
        if options["out"]:
            try:
                write(options["out"], ran)
                if options["requests"]:
                    write_requests(options["out"], ran)
            except OSError as error:
                raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(ran.as_json()))
        else:
            show(console(self.stdout), ran)

    def _fit(self, options: dict[str, Any]) -> None:
        file = options["scenario"]
        if (options["fit"] == fitting.LEDGER) != (file is None):
            raise CommandError("Give a file of measurements and its format, or --fit ledger alone.")
        try:
            fits, failed = fitting.fit(options["fit"], file, options["seed"] or 0)
        except TraceError as error:
            raise CommandError(str(error)) from error
        stored = fitting.store(fits, file) if options["write"] else []
        if options["json"]:
            self.stdout.write(json.dumps(fitting.as_json(fits, failed, stored)))
        else:
            fitting.show(console(self.stdout), fits, failed, stored)


def write(folder: Path, ran: Simulated) -> None:
    """Write every table, and `result.json` with all but the series and changes, into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = ran.tables | {"series": series_table(ran.result), "changes": change_table(ran.result)}
    for name, each in tables.items():
        each.write_csv(folder / f"{name}.csv")
    (folder / "result.json").write_text(json.dumps(ran.as_json(), indent=1), encoding="utf-8")


def write_requests(folder: Path, ran: Simulated) -> None:
    """Write a row for every request; where there is no latency the cell is empty."""
    result, cluster = ran.result, ran.result.cluster
    requests, outcomes = result.requests, result.outcomes
    columns: list[Any] = [
        requests.arrival_s,
        np.array(cluster.models)[requests.model],
        np.array(cluster.regions)[requests.region],
        np.array([one.slo_class for one in cluster.classes])[requests.slo_class],
        np.array(ran.staged.tenants)[requests.tenant],
        requests.prompt_tokens,
        result.output_tokens,
        np.array([outcome.name.lower() for outcome in Outcome])[outcomes["state"]],
        outcomes["instance"],
        outcomes["preemptions"],
        outcomes["cached_tokens"],
        *(latency_s(result, name) for name in LATENCIES),
    ]
    rows = (
        ["" if value != value else value for value in row]  # noqa: PLR0124  # NaN is not equal to itself
        for start in range(0, len(columns[0]), CHUNK)
        for row in zip(*(column[start : start + CHUNK].tolist() for column in columns), strict=True)
    )
    write_csv(folder / "requests.csv", REQUEST_COLUMNS, rows)


def show(shown: Console, ran: Simulated) -> None:
    about, tables = ran.about, ran.tables
    requests, hours = tables["measures"].rows, tables["hours"].rows
    shown.print(
        f"[bold]{about['scenario']}[/], seed {about['seed']}: {about['requests']:,} requests over"
        f" {about['simulated_s'] / 3600:.2f} h, simulated in {about['took_s']:.2f} s"
    )
    if about["left_out"] or about["clipped"]:
        shown.print(f"{about['left_out']:,} requests left out, {about['clipped']:,} clipped to the context")
    groups = dict.fromkeys(row[:2] for row in requests)
    shown.print(table("Requests", _of_requests({row[:4]: row[4] for row in requests}), groups))
    if tables["runs"].rows:
        shown.print(table("Application runs", RUNS, tables["runs"].as_dicts()))
    groups = dict.fromkeys(row[:2] for row in hours)
    shown.print(table("Fleet, hours of instances", _of_fleet({row[:3]: row[3] for row in hours}), groups))
    if about["strategy"] != "none":
        shown.print(
            f"Scaled by {about['strategy']}: {about['instance_hours']:,.2f} instance-hours, {about['cost_usd']:,.2f} USD,"
            f" {len(tables['moves'].rows):,} moves, {len({row[0] for row in tables['plans'].rows}):,} plans"
        )
    counters = ", ".join(f"{name} {value:,}" for name, value in tables["counters"].rows if value)
    shown.print(f"Counters: {counters}")


RUNS = (
    Column("Application", "application"),
    *(Column(name.replace("_", " "), name, "{:,}") for name in RUN_COLUMNS[1:6]),
    *(Column(name.replace("_s", " (s)"), name, "{:,.2f}") for name in RUN_COLUMNS[6:]),
)
GROUP = (Column("By", lambda group: group[0]), Column("Group", lambda group: group[1]))


def _of_requests(values: dict[tuple[Any, ...], Any]) -> list[Column]:
    def column(head: str, name: str, statistic: str, form: str | Callable[[Any], str]) -> Column:
        return Column(head, lambda group: values.get((*group, name, statistic)), form)

    return [
        *GROUP,
        column("requests", "requests", "count", "{:,}"),
        column("done", "done", "count", "{:,}"),
        column("TTFT p50", "ttft_s", "p50", seconds),
        column("p95", "ttft_s", "p95", seconds),
        column("ITL p95", "itl_s", "p95", seconds),
        column("E2E p50", "e2e_s", "p50", seconds),
        column("p95", "e2e_s", "p95", seconds),
        column("p99", "e2e_s", "p99", seconds),
        column("queue p95", "queue_s", "p95", seconds),
        column("SLO met", "slo_attainment", "ratio", share),
    ]


def _of_fleet(values: dict[tuple[Any, ...], float]) -> list[Column]:
    def column(head: str, name: str) -> Column:
        return Column(head, lambda group: values.get((*group, name), 0.0), "{:,.2f}")

    names = {
        "paid": "instance_h",
        "ready": "ready_h",
        "wasted": "wasted_h",
        "donated": "donated_h",
        "cost (USD)": "cost_usd",
        "spot income (USD)": "spot_income_usd",
    }
    return [
        *GROUP,
        *(column(head, name) for head, name in names.items()),
    ]


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{1000 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"
