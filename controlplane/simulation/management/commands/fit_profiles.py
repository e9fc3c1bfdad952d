import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.simulation.selectors import ledger_measurements, ledger_rows
from controlplane.simulation.services import store_profiles
from controlplane.terminal import Column, console, table
from scheduling.fleet.profile_fitting import Error, Fit, Setting
from scheduling.fleet.published_profiles import MEASURED, fit_all, read_blis
from scheduling.table_files import TraceError

ACTOR = "fit_profiles"


class Command(BaseCommand):
    help = (
        "Fit performance profiles to published measurements or to our own ledger, and give their errors on "
        "configurations that were left out of the fit."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, nargs="?", help="the measurements; `.gz` is unpacked on the way")
        parser.add_argument("--format", choices=[*MEASURED, "blis"])
        parser.add_argument("--ledger", action="store_true", help="fit our own instances from the request ledger")
        parser.add_argument("--variant", default="", help="only series whose variant begins so, such as vllm")
        parser.add_argument("--write", action="store_true", help="store profiles of models and GPU types we have")
        parser.add_argument("--seed", type=int, default=0, help="of the configurations that are held out")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["ledger"] == bool(options["file"]) or bool(options["file"]) != bool(options["format"]):
            raise CommandError("Give a file and its --format, or --ledger.")
        fits, failed = self._fits(options)
        fits = [fit for fit in fits if fit.setting.variant.startswith(options["variant"])]
        failed = {key: why for key, why in failed.items() if key.variant.startswith(options["variant"])}
        stored = []
        if options["write"]:
            source = "own ledger" if options["ledger"] else f"fit of {options['file'].name}"
            stored = [str(row) for row in store_profiles(fits, source, ACTOR)]
        if options["json"]:
            self.stdout.write(json.dumps(as_json(fits, failed, stored)))
            return
        shown = console(self.stdout)
        shown.print(table(TITLE, COLUMNS, fits))
        for setting, why in failed.items():
            shown.print(f"[yellow]{setting}[/]: {why}")
        for line in summary(fits):
            shown.print(line)
        if options["write"]:
            shown.print(f"Stored {len(stored)} profiles" + "".join(f"\n  {name}" for name in stored))

    @staticmethod
    def _fits(options: dict[str, Any]) -> tuple[list[Fit], dict[Setting, str]]:
        try:
            if options["ledger"]:
                return fit_all(ledger_measurements(ledger_rows()), seed=options["seed"])
            if options["format"] == "blis":
                return read_blis(options["file"]), {}
            return fit_all(MEASURED[options["format"]](options["file"]), seed=options["seed"])
        except TraceError as error:
            raise CommandError(str(error)) from error


def error_words(error: Error | None) -> str:
    if error is None:
        return "-"
    values = (error.fitted_pct, error.held_out_pct, error.held_out_median_pct)
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values)


def coefficients(*names: str) -> Callable[[Fit], str]:
    return lambda fit: " ".join(f"{getattr(fit.profile, name):.3g}" for name in names)


DECODE = coefficients("decode_a_s", "decode_b_s_per_sequence", "decode_c_s_per_token")
TITLE = "Seconds and tokens; errors in percent: of points fitted / held-out mean / held-out median"
COLUMNS = (
    Column("Model", lambda fit: fit.setting.model.rpartition("/")[2]),
    Column("GPU", lambda fit: fit.setting.gpu_type),
    Column("TP", lambda fit: fit.setting.tensor_parallel),
    Column("Variant", lambda fit: fit.setting.variant),
    Column("n", lambda fit: f"{fit.points}/{fit.configurations}" if fit.points else None, "{}"),
    Column(
        "prefill t0 / a / b / c",
        coefficients("prefill_t0_s", "prefill_a_s", "prefill_b_s_per_token", "prefill_c_s_per_token2"),
        "{}",
    ),
    Column("TTFT error", lambda fit: fit.prefill_error, error_words),
    Column(
        "decode a / b / c",
        lambda fit: DECODE(fit) if fit.decodes else None,
        "{}",
    ),
    Column("TPOT error", lambda fit: fit.decode_error, error_words),
)


def summary(fits: list[Fit]) -> list[str]:
    """Return one line per kind of error: the median over series with a held-out error."""
    lines = []
    for name, attribute in (("TTFT", "prefill_error"), ("TPOT", "decode_error")):
        errors: list[Error] = [error for fit in fits if (error := getattr(fit, attribute)) is not None]
        held = [error for error in errors if error.held_out_pct is not None]
        if held:
            means = median(error.held_out_pct or 0.0 for error in held)
            medians = median(error.held_out_median_pct or 0.0 for error in held)
            lines.append(
                f"{name}, {len(held)} series: median of the held-out mean errors {means:.1f}%,"
                f" of the held-out median errors {medians:.1f}%"
            )
    return lines


def as_json(fits: list[Fit], failed: dict[Setting, str], stored: list[str]) -> dict[str, Any]:
    return {
        "fits": [asdict(fit) for fit in fits],
        "failed": {str(setting): why for setting, why in failed.items()},
        "summary": summary(fits),
        "stored": stored,
    }
