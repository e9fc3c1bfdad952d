"""Uploaded traces for what-ifs: checked, stored compressed, and read again as requests."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif.models import TraceFile
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.demand import TraceOf
from scheduling.simulation.scenario.toml_lines import ScenarioProblem
from scheduling.simulation.staging.demand import named_workload
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.traces import FORMATS, UNITS, load_trace, unit_of
from scheduling.table_files import TraceError

MAX_BYTES: Final = 64 * 1024 * 1024
MAX_KEPT: Final = 20
KEYS: Final = ("speed", "limit", "model", "models", "region", "slo_class", "tenant")
"""Keys of a scenario's `[trace]` for values that the trace lacks."""


def upload(name: str, trace_format: str, content: bytes, actor: User, unit: str = "") -> TraceFile:
    """Check *content* and store it as a trace. Raise ActionError naming the problem and its place.

    *unit* is that of its times, as in `read_trace`.
    """
    if trace_format not in FORMATS:
        raise ActionError(f"There is no trace format {trace_format!r}; there is {', '.join(FORMATS)}.")
    if unit and unit not in UNITS:
        raise ActionError(f"There is no unit {unit!r} of a trace's times; there is {', '.join(UNITS)}.")
    if len(content) > MAX_BYTES:
        raise ActionError(f"The file has {len(content):,} bytes; {MAX_BYTES:,} are the most.")
    try:
        with _file(content) as path:
            unit = unit or unit_of(path, trace_format)
            workload = load_trace(path, trace_format, unit=unit)
    except TraceError as error:
        place = f" in {error.place}" if error.place else ""
        raise ActionError(f"The file is not a trace of the format {trace_format}{place}: {error.what}.") from error
    if not len(workload):
        raise ActionError("The trace has no request with a prompt and an output.")
    row = TraceFile.objects.create(
        name=name[:160],
        format=trace_format,
        unit=unit,
        content=zlib.compress(content),
        requests=len(workload),
        span_s=float(workload.arrival_s[-1]),
        uploaded_by=actor,
    )
    record("trace.uploaded", row, actor=actor)
    old = TraceFile.objects.order_by("-pk").values_list("pk", flat=True)[MAX_KEPT:]
    TraceFile.objects.filter(pk__in=list(old)).delete()
    return row


def workload_of(arrivals: dict[str, Any], scenario: Scenario, seed: int) -> Workload:
    """Return the requests of the arrivals `{"kind": "file", "trace": number, "speed", "model", "models", ...}`.

    The other keys are those of a scenario's `[trace]`. Raises ValueError if the file is gone, or names are unknown.
    """
    row = TraceFile.objects.filter(pk=arrivals["trace"]).first()
    if row is None:
        raise ValueError(f"Trace {arrivals['trace']} is no longer kept. Upload it again.")
    table = _table(row, arrivals)
    with _file(zlib.decompress(row.content)) as path:
        pooled = bool(scenario.pooling)
        workload = load_trace(path, row.format, seed=seed, limit=table.limit, without_output=pooled, unit=row.unit)
    try:
        return named_workload(scenario, table, workload)
    except ScenarioProblem as problem:
        raise ValueError(f"{row.name}: {problem}") from problem


def misfits(arrivals: dict[str, Any], scenario: Scenario) -> dict[str, str]:
    """Return problems of *arrivals*, those of `workload_of`, with *scenario*, by key of `[trace]`."""
    row = TraceFile.objects.defer("content").filter(pk=arrivals["trace"]).first()
    if row is None:
        return {"trace": f"{arrivals['trace']} is no longer kept: upload it again"}
    if unknown := [name for name in arrivals if name not in ("kind", "trace", *KEYS)]:
        return {unknown[0]: f"is no key; there is {', '.join(KEYS)}"}
    try:
        named_workload(scenario, _table(row, arrivals), _names(row.pk, row.uploaded_at))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return {str(first["loc"][0]): str(first["msg"]).removeprefix("Value error, ")}
    except ScenarioProblem as problem:
        return {str(problem.key[-1]): str(problem)}
    return {}


@lru_cache(maxsize=MAX_KEPT)
def _names(pk: int, uploaded_at: datetime) -> Workload:
    """Return the trace *pk* without its requests, for its names; an uploaded trace never changes."""
    row = TraceFile.objects.get(pk=pk)
    with _file(zlib.decompress(row.content)) as path:
        workload = load_trace(path, row.format, unit=row.unit)
    return workload.select(np.zeros(len(workload), np.bool_))


def _table(row: TraceFile, arrivals: dict[str, Any]) -> TraceOf:
    """Return the scenario's `[trace]` of *arrivals*. Raise ValueError for an invalid key."""
    given = {name: value for name, value in arrivals.items() if name not in ("kind", "trace")}
    return TraceOf.model_validate({**given, "file": row.name, "format": row.format})


@contextmanager
def _file(content: bytes) -> Iterator[Path]:
    with TemporaryDirectory(prefix="pilothouse-trace-") as folder:
        path = Path(folder) / ("trace.gz" if content[:2] == b"\x1f\x8b" else "trace")
        path.write_bytes(content)
        yield path
