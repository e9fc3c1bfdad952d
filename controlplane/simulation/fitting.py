"""Fits of performance profiles to published measurements or to our own ledger, with their errors as tables and JSON."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console

from controlplane.simulation.selectors import ledger_measurements, ledger_rows
from controlplane.simulation.services import store_profiles
from controlplane.terminal import Column, table
from scheduling.fleet.profile_fitting import Error, Fit, Setting
from scheduling.fleet.published_profiles import MEASURED, fit_all, read_blis

ACTOR: Final = "simulate --fit"
LEDGER, BLIS = "ledger", "blis"
FORMATS: Final = (*MEASURED, BLIS, LEDGER)


def fit(source: str, file: Path | None, seed: int) -> tuple[list[Fit], dict[Setting, str]]:
    """Return the fits to *source*, one of FORMATS, and why settings have none. Raise TraceError for an invalid *file*."""
    if file is None:
        return fit_all(ledger_measurements(ledger_rows()), seed=seed)
    return (read_blis(file), {}) if source == BLIS else fit_all(MEASURED[source](file), seed=seed)


def store(fits: list[Fit], file: Path | None) -> list[str]:
    """Store profiles of models and GPU types in the inventory; return their names."""
    return [str(row) for row in store_profiles(fits, f"fit of {file.name}" if file else "own ledger", ACTOR)]


def show(shown: Console, fits: list[Fit], failed: dict[Setting, str], stored: list[str]) -> None:
    shown.print(table(TITLE, COLUMNS, fits))
    for setting, why in failed.items():
        shown.print(f"[yellow]{setting}[/]: {why}")
    for line in [*summary(fits), *(f"Stored: {name}" for name in stored)]:
        shown.print(line)


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
