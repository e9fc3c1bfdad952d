"""Readers of public request traces: when each request came, how long its prompt was and how much it produced.

- azure: CSV `TIMESTAMP,ContextTokens,GeneratedTokens`. Azure LLM inference traces of 2023 (Splitwise, ISCA 2024) and
  2024 (DynamoLLM, HPCA 2025).
- mooncake: JSON lines `timestamp` (ms, or as *unit* says), `input_length`, `output_length`, `hash_ids`. Mooncake, FAST
  2025. Later turns of a conversation (`session_id`) may have a `delay` (after the answer to the one before) instead, as
  AIPerf writes them.
- burstgpt: CSV `Timestamp` (s), `Model`, `Request tokens`, `Response tokens` and more. BurstGPT, 2024.
- servegen: CSV of demand in bins of ten minutes, `t_s`, `requests`, `prompt_tokens`, `output_tokens`. ServeGen, 2025.
- ledger: CSV of our own request ledger, from `manage.py simulate --export` or the console's Requests page.

A reader is a generator: it holds one row at a time (ServeGen: the arrivals of one bin), so a trace of any length can be
streamed; `load_trace` collects one in arrays. Files that end in `.gz` are unpacked on the way. Columns may stand in any
order and others may be present. Times are numbers, clock times since the start (26:10:05) or dates with a time.
"""

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from scheduling.simulation.workload import prefix_groups
from scheduling.simulation.workload.columns import Coded, Workload, buffered, calls_of
from scheduling.table_files import DATE, MOST_TOKENS, UNREADABLE, Row, TraceError, csv_rows, open_text

__all__ = [
    "FORMATS",
    "MOONCAKE_BLOCK_TOKENS",
    "UNITS",
    "TraceError",
    "TraceRequest",
    "load_trace",
    "read_trace",
    "unit_of",
]

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_BIN_S = 600.0
MOST_OF_BIN = 10_000_000
MOST_NAMES = 2**15 - 1
LONGEST_S = 10 * 365 * 86_400.0
"""Longest span of a trace, from its first row."""
LOOKED_AT, LEAST_S = 1_000, 0.5
"""Times by which the first so many requests came within that are wrong: no trace has 2,000 a second. All at
one time is another thing, a batch."""
UNITS = {"ms": 1000, "s": 1}
"""Units of time by how many make a second."""
SPARSE_S, LONG_S = 60.0, 7 * 86_400.0
"""Numbers that would be less than a request a minute for more than a week, were they seconds, are milliseconds. Published
are 12,031 requests in 59 minutes; as seconds it would be one in five minutes for 41 days."""
TIME_COLUMNS = {
    "azure": "TIMESTAMP", "mooncake": "timestamp", "burstgpt": "Timestamp", "servegen": "t_s", "ledger": "Arrived (UTC)",
}  # fmt: skip


NO_CALL = "", "", "", None, None, ""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. A failed request of the original system has `output_tokens` 0."""

    arrival_s: float  # since the first row; with `delay_s`, that of its session's first turn
    prompt_tokens: int
    output_tokens: int
    model: str = ""  # as the trace names it
    prefix_blocks: tuple[
        int, ...
    ] = ()  # equal leading ids = equal leading blocks of MOONCAKE_BLOCK_TOKENS prompt tokens
    region: str = ""
    tenant: str = ""
    slo_class: str = ""
    session: str = ""  # the conversation that it is a turn of
    delay_s: float | None = None  # after the answer to the previous turn
    call: tuple[str, str, str, float | None, float | None, str] = NO_CALL
    """Application, run, unit, the run's deadline in seconds, milliseconds from its arrival to its end, and its outcome."""
    step: int = 0  # number of the call in its run, from 1
    prefix_groups: str = ""
    line: int = field(default=0, compare=False)  # of the file


def read_azure(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    first_s: float | None = None
    for row in csv_rows(path, "TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        moment_s = row.moment_s("TIMESTAMP", usual=DATE)
        first_s = moment_s if first_s is None else first_s
        yield TraceRequest(
            moment_s - first_s, row.tokens("ContextTokens"), row.tokens("GeneratedTokens"), line=row.line
        )


def read_burstgpt(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    first_s: float | None = None
    for row in csv_rows(path, "Timestamp", "Model", "Request tokens", "Response tokens"):
        moment_s = row.moment_s("Timestamp")
        first_s = moment_s if first_s is None else first_s
        prompt_tokens, output_tokens = row.tokens("Request tokens"), row.tokens("Response tokens")
        yield TraceRequest(moment_s - first_s, prompt_tokens, output_tokens, row.values["Model"], line=row.line)


def unit_of(path: Path, trace_format: str) -> str:
    """Return the unit of the numbers that are times in the trace at *path*: `s`, or `ms` for `mooncake`.

    Raises TraceError for a trace of Mooncake's format that may as well be in seconds, as others write it: read as
    milliseconds it would run a thousand times too fast.
    """
    if trace_format != "mooncake":
        return "s"
    first: float | None = None
    span, count = 0.0, 0  # the longest time that is a number: since the first row, or a delay
    with open_text(path) as file:
        try:
            for text in file:
                fields = json.loads(text) if text.strip() else {}
                moment, delay = fields.get("timestamp"), fields.get("delay")
                if isinstance(moment, int | float):
                    first = moment if first is None else first
                    span, count = max(span, moment - first), count + 1
                elif moment is None and isinstance(delay, int | float):
                    span, count = max(span, delay), count + 1
        except (ValueError, RecursionError, AttributeError, *UNREADABLE):
            return "ms"  # the reader says what is wrong there
    if span and not (span > LONG_S and span > SPARSE_S * count):
        what = (
            f"may be in ms, which makes {_words(span / 1000)}, or in s, which makes {_words(span)}: "
            "say which (unit = ms or s)"
        )
        raise TraceError(path, 0, "timestamp", what)
    return "ms"


def _words(seconds: float) -> str:
    """Return a time in the largest of its units."""
    size, name = next((each for each in ((86_400, "days"), (3600, "h"), (60, "min")) if seconds >= each[0]), (1, "s"))
    return f"{seconds / size:,.3g} {name}"


def read_mooncake(path: Path, seed: int = 0, unit: str = "ms") -> Iterator[TraceRequest]:
    in_second = UNITS[unit]
    first: float | None = None
    sessions: dict[str, float] = {}  # when the first turn of each came
    number = 0
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TraceError(path, number, "", f"is not JSON: {error}") from None
                if not isinstance(fields, dict):
                    raise TraceError(path, number, "", "is not a JSON object")
                blocks = fields.get("hash_ids", [])
                if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
                    raise TraceError(path, number, "hash_ids", "is not a list of whole numbers")
                if blocks and not -(2**63) <= min(blocks) <= max(blocks) < 2**64:
                    raise TraceError(path, number, "hash_ids", "holds a number of more than 64 bits")
                row = Row(path, number, {column: str(value) for column, value in fields.items()})
                session = row.values.get("session_id", "")
                waits = fields.get("timestamp") is None and fields.get("delay") is not None
                for column in ("delay" if waits else "timestamp", "input_length", "output_length"):
                    if fields.get(column) is None:
                        raise TraceError(path, number, column, "is missing")
                if waits and session not in sessions:
                    what = "the first turn of a session needs a timestamp" if session else "needs a session_id"
                    raise TraceError(path, number, "delay", what)
                if waits:
                    arrival_s, delay_s = sessions[session], row.number("delay") / in_second
                else:
                    moment, delay_s = row.moment_s("timestamp"), None
                    moment *= 1 if row.is_number("timestamp") else in_second
                    first = moment if first is None else first
                    arrival_s = (moment - first) / in_second
                if session:
                    sessions.setdefault(session, arrival_s)
                prompt_tokens = row.tokens("input_length")
                least, rest = divmod(prompt_tokens, MOONCAKE_BLOCK_TOKENS)
                if blocks and not least <= len(blocks) <= least + (rest > 0):
                    what = f"are {len(blocks)} blocks of {prompt_tokens:,} tokens; a block has {MOONCAKE_BLOCK_TOKENS} here"
                    raise TraceError(path, number, "hash_ids", what)
                yield TraceRequest(
                    arrival_s,
                    prompt_tokens,
                    row.tokens("output_length"),
                    prefix_blocks=tuple(blocks),
                    session=session,
                    delay_s=delay_s,
                    line=number,
                )
        except UNREADABLE as error:
            raise TraceError(path, number + 1, "", f"cannot be read: {error}") from error


def read_servegen(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield arrivals drawn from the rates: a Poisson count in each bin, uniform times within it, and the bin's mean
    lengths.

    The published classes are sums over ten minutes, not requests: this is a draw from them, not a record, and *seed*
    fixes it. Bins without requests (gaps in the collection) stay empty.
    """
    draw = np.random.default_rng(seed)
    first_s: float | None = None
    for row in csv_rows(path, "t_s", "requests", "prompt_tokens", "output_tokens"):
        start_s = row.moment_s("t_s")
        first_s = start_s if first_s is None else first_s
        mean_requests = row.number("requests")
        if mean_requests == 0:
            continue
        if mean_requests > MOST_OF_BIN:
            what = f"{row.values['requests']!r} requests in ten minutes are more than {MOST_OF_BIN:,}"
            raise TraceError(path, row.line, "requests", what)
        prompt_tokens, output_tokens = (
            max(1, round(row.number(column) / mean_requests)) for column in ("prompt_tokens", "output_tokens")
        )
        for column, tokens in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if tokens > MOST_TOKENS:
                raise TraceError(
                    path, row.line, column, f"are {tokens:,} tokens a request; {MOST_TOKENS:,} are the most"
                )
        for offset_s in np.sort(draw.uniform(0.0, SERVEGEN_BIN_S, draw.poisson(mean_requests))):
            yield TraceRequest(start_s - first_s + float(offset_s), prompt_tokens, output_tokens, line=row.line)


def read_ledger(path: Path, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield requests as tenants sent them, from their own regions, including refused ones, some of them 0 long.

    `manage.py simulate --export` writes microseconds in the order of arrival, with runs and prefix groups. The console's
    file has whole seconds, newest first: `load_trace` sorts it, `read_trace` refuses it.
    """
    first_s: float | None = None
    for row in csv_rows(
        path, "Arrived (UTC)", "Tenant", "Model", "SLO class", "Region", "Prompt (tokens)", "Output (tokens)"
    ):
        moment_s = row.moment_s("Arrived (UTC)", usual=DATE)
        first_s = moment_s if first_s is None else first_s
        values = row.values
        application, run, groups = (values.get(name, "") for name in ("Application", "Run", "Prefix groups"))
        due_s, took_ms = (row.number(name) if values.get(name) else None for name in ("Run due (s)", "E2E (ms)"))
        step = row.count("Step") if values.get("Step") else 0
        if run and application and "Step" in values and not step:
            raise TraceError(path, row.line, "Step", "is missing: the number of the call in its run, from 1")
        try:
            prefix_groups.read(groups)
        except ValueError as error:
            raise TraceError(path, row.line, "Prefix groups", str(error)) from error
        yield TraceRequest(
            moment_s - first_s,
            row.tokens("Prompt (tokens)"),
            row.tokens("Output (tokens)"),
            values["Model"],
            region=values.get("Own region") or values["Region"],
            tenant=values["Tenant"],
            slo_class=values["SLO class"],
            call=(application, run, values.get("Unit", ""), due_s, took_ms, values.get("Outcome", "")),
            step=step,
            prefix_groups=groups,
            line=row.line,
        )


FORMATS: dict[str, Callable[[Path, int], Iterator[TraceRequest]]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "burstgpt": read_burstgpt,
    "servegen": read_servegen,
    "ledger": read_ledger,
}


def read_trace(path: Path, trace_format: str, *, seed: int = 0, unit: str = "") -> Iterator[TraceRequest]:
    """Yield the requests of the trace at *path* in the order of the file; *seed* is used by formats that hold rates.

    *unit* is that of the numbers that are times in `mooncake`, `ms` or `s`; empty: as `unit_of` finds it.

    Raises TraceError when the file or a row cannot be read, or when a row is earlier than the one above it (sort the
    file by time first), and KeyError for a format that is not in `FORMATS`.
    """
    before_s, column = 0.0, TIME_COLUMNS[trace_format]
    for number, request in enumerate(_plausible(path, trace_format, seed, unit), 1):
        if request.delay_s is None:
            if request.arrival_s < before_s:
                earlier_s = before_s - request.arrival_s
                what = f"request {number} came {earlier_s:g} s before the one above it: sort the file by time"
                raise TraceError(path, request.line, column, what)
            before_s = request.arrival_s
        yield request


def _plausible(path: Path, trace_format: str, seed: int, unit: str) -> Iterator[TraceRequest]:
    """Yield the requests of a trace. Raise TraceError when its times cannot be in the unit that the format has."""
    column = TIME_COLUMNS[trace_format]
    unit = unit or unit_of(path, trace_format)
    if trace_format == "mooncake":
        requests = read_mooncake(path, seed, unit)
    elif unit == "s":
        requests = FORMATS[trace_format](path, seed)
    else:
        raise TraceError(path, 0, column, f"has seconds where it has numbers: {trace_format} has no other unit")
    for number, request in enumerate(requests, 1):
        span_s = abs(request.arrival_s)
        if span_s > LONGEST_S:
            what = f"is {span_s / 86_400 / 365:,.0f} years from the first row: numbers are in {unit} here"
            raise TraceError(path, request.line, column, what)
        if number == LOOKED_AT and 0 < span_s < LEAST_S and trace_format != "servegen":  # which has its rates
            what = f"the first {LOOKED_AT:,} requests came within {span_s:g} s: numbers are in {unit} here"
            raise TraceError(path, request.line, column, what)
        yield request


def load_trace(
    path: Path,
    trace_format: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    without_output: bool = False,
    unit: str = "",
) -> Workload:
    """Return the trace at *path* in arrays: its first *limit* requests that have a prompt and an output.

    *unit* is as in `read_trace`.

    Requests without either (failed in the original system) are left out and counted in `Workload.left_out`; with
    *without_output* only those without a prompt, since models that pool have no output. Rows are
    streamed into the columns' own buffers, so memory is that of the arrays (plus an eighth while they grow). A ledger
    export is sorted by arrival; other formats raise TraceError when a row is earlier than the one above it.
    """
    arrivals, prompts, outputs = array("d"), array("i"), array("i")
    codes = {"model": array("h"), "region": array("h"), "slo_class": array("h"), "tenant": array("i")}
    names: dict[str, dict[str, int]] = {column: {} for column in codes}
    prefix_first, prefix_hashes = array("q", [0]), array("q")
    left_out = 0
    by_time = trace_format == "ledger"
    ledger = list[TraceRequest]()
    read = (
        _plausible(path, trace_format, seed, unit) if by_time else read_trace(path, trace_format, seed=seed, unit=unit)
    )
    for request in read:
        if request.delay_s is not None:
            what = "the turn waits for an answer, and a simulation is given times: give it a timestamp, or replay the trace"
            raise TraceError(path, request.line, "delay", what)
        if request.prompt_tokens == 0 or (request.output_tokens == 0 and not without_output):
            left_out += 1
            continue
        if len(arrivals) == limit:
            break
        arrivals.append(request.arrival_s)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        for column, known in names.items():
            code = known.setdefault(getattr(request, column), len(known))
            if code > MOST_NAMES:
                raise TraceError(
                    path, request.line, column, f"is the name of one {column} too many: over {MOST_NAMES:,}"
                )
            codes[column].append(code)
        if by_time:
            ledger.append(request)
        prefix_hashes.extend(block if block < 2**63 else block - 2**64 for block in request.prefix_blocks)
        prefix_first.append(len(prefix_hashes))
    workload = Workload(
        buffered(arrivals, np.float64),
        buffered(prompts, np.int32),
        buffered(outputs, np.int32),
        Coded(buffered(codes["model"], np.int16), list(names["model"])),
        Coded(buffered(codes["region"], np.int16), list(names["region"])),
        Coded(buffered(codes["slo_class"], np.int16), list(names["slo_class"])),
        Coded(buffered(codes["tenant"], np.int32), list(names["tenant"])),
        prefix_first=buffered(prefix_first, np.int64) if prefix_hashes else None,
        prefix_hashes=buffered(prefix_hashes, np.int64) if prefix_hashes else None,
        prefix_block_tokens=MOONCAKE_BLOCK_TOKENS if prefix_hashes else 0,
        left_out=left_out,
    )
    return _with_calls(path, workload, ledger) if by_time else workload


def _with_calls(path: Path, workload: Workload, requests: list[TraceRequest]) -> Workload:
    """Return *workload* in the order of arrival, with the runs and the prefixes of *requests*, of our ledger.

    Raises TraceError where the steps of a run are not in the order of arrival.
    """
    order = np.lexsort((np.array([each.step for each in requests]), workload.arrival_s))
    workload, listed = workload.select(order), [requests[at] for at in order]
    if not listed:
        return workload
    first, hashes = prefix_groups.prefixes_of([each.prefix_groups for each in listed])
    before: dict[tuple[str, ...], int] = {}
    for each in listed:
        key = each.tenant, *each.call[:2]
        if each.step and each.step <= before.get(key, 0):
            raise TraceError(
                path, each.line, "Step", f"is {each.step}, and run {key[2]} has had step {before[key]} before"
            )
        before[key] = each.step
    calls = calls_of([each.tenant for each in listed], *zip(*(each.call for each in listed), strict=True))
    arrival_s = workload.arrival_s - workload.arrival_s[0]
    block = prefix_groups.BLOCK_TOKENS if any(each.prefix_groups for each in listed) else 0
    return replace(
        workload, arrival_s=arrival_s, prefix_first=first, prefix_hashes=hashes, prefix_block_tokens=block, calls=calls
    )
