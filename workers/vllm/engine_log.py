"""The log of a vLLM server: the phase of its start, its first error, and its size.

Lines are those of vLLM 0.32. The log is append-only and belongs to one start: the launcher rotates the last one.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

KEPT = 2  # earlier logs besides the present one: NAME.log.1 is the latest of them
MAX_BYTES = 8 * 2**20
TAIL_BYTES = 256 * 1024
MAX_ERROR = 400

# What a line says of the start, in the order of the start; (pattern, phase). A group is a percentage or `i/n`.
PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"non-default args:", "Reading the configuration"),
        (r"Initializing a V\d LLM engine", "Starting the engine"),
        (r"[Dd]ownloading .*?(\d+)%\|", "Downloading weights"),
        (r"Starting to load model", "Loading weights"),
        (r"Loading \S+ checkpoint shards:\s+(\d+)% Completed", "Loading weights"),
        (r"Loading weights took|Model loading took", "Weights loaded"),
        (r"Dynamo bytecode transform|Compiling a graph|Start compiling|torch\.compile took", "Compiling"),
        (r"Available KV cache memory|KV cache size:", "Allocating the KV cache"),
        (r"Warming up|[Aa]utotuning", "Warming up"),
        (r"Capturing .*CUDA graphs.*?:\s+(\d+)%", "Capturing graphs"),
        (r"Graph capturing finished|init engine \(", "Engine ready"),
        (r"Starting vLLM (?:API )?server|Started server process", "Starting the API server"),
        (r"Application startup complete", "Ready"),
    )
)
STARTING = "Starting"

PREFIX = re.compile(r"^\([\w ]+ pid=\d+\) ?")  # (EngineCore pid=8834)
STAMP = re.compile(r"^(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?")
EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Timeout))(?:: (.*))?$")
ARGUMENTS = re.compile(r"^[\w./-]+(?: \w+)?: error: ")  # argparse, of `vllm serve` too
# Errors that only pass on that another process has failed.
SECOND_HAND = re.compile(
    r"EngineDeadError|See (?:root cause|stack trace)|EngineCore encountered an issue|"
    r"Engine core initialization failed|WorkerProc initialization failed|^(?:SystemExit|KeyboardInterrupt)"
)
SERVES = re.compile(r'HTTP/1\.1" 200|Avg prompt throughput')
# Lines that say without a traceback why a server ended.
PLAIN = re.compile(r"(Worker proc \S+ died unexpectedly[^,]*|engine core exited unexpectedly|.*CUDA out of memory.*)")


def tail(path: Path) -> str:
    """Return the end of the file in whole lines; "" if there is no file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            if size > TAIL_BYTES:
                stream.readline()
            return stream.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last *count* lines as a terminal would show them: of a progress bar, its last state."""
    lines = [line.rstrip("\n").rpartition("\r")[2] for line in tail(path).replace("\r\n", "\n").split("\n")]
    return [line for line in lines if line.strip()][-count:]


def startup(text: str) -> str:
    """Return the phase of the start that the log has reached, with its percentage: "Loading weights, 50%"."""
    reached, shown = 0, STARTING
    for line in re.split(r"[\r\n]+", text):
        for rank in range(len(PHASES) - 1, reached - 1, -1):
            pattern, phase = PHASES[rank]
            if match := pattern.search(line):
                reached = rank
                shown = f"{phase}, {match[1]}%" if pattern.groups else phase
                break
    return shown


def root_error(text: str) -> str:
    """Return the error that ended the server, as one line; "" without any.

    When an engine fails, its exception is logged first, then those of the processes that waited for it: they say
    "see root cause above". In a chain of exceptions the first is the cause. What precedes an answered request was survived.
    """
    lines = [STAMP.sub("", PREFIX.sub("", line)) for line in text.splitlines()]
    errors: list[str] = []
    after_service = in_traceback = False
    for number, line in enumerate(lines):
        exception = EXCEPTION.match(line) if in_traceback else None
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif SERVES.search(line):
            after_service = True
        elif exception or ARGUMENTS.match(line):
            errors = [] if after_service else errors
            after_service = in_traceback = False
            errors.append(_sentence(lines, number, exception) if exception else line.partition(": error: ")[2])
    causes = [error for error in errors if not SECOND_HAND.search(error)]
    if not causes:
        causes = [plain[1] for line in lines if (plain := PLAIN.search(line))]
    error = next(iter([*causes, *errors]), "")
    return error if len(error) <= MAX_ERROR else error[: MAX_ERROR - 1] + "…"


def rotate_log(path: Path) -> None:
    """Make room for a new start's log: NAME.log becomes NAME.log.1, then NAME.log.2; the oldest is deleted."""
    for number in range(KEPT, 0, -1):
        earlier = _numbered(path, number - 1)
        with suppress(FileNotFoundError):
            earlier.replace(_numbered(path, number))


def shorten(path: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Move the end of a log that has grown too large to NAME.log.1 and empty the log; the server keeps appending to it.

    Lines written between the copy and the cut are lost, as with logrotate's copytruncate.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        with path.open("rb") as stream:
            stream.seek(-max_bytes, os.SEEK_END)
            _numbered(path, 1).write_bytes(stream.read())
        os.truncate(path, 0)
    except FileNotFoundError:
        return False
    return True


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _sentence(lines: Sequence[str], number: int, exception: re.Match[str]) -> str:
    """Return `ValueError: why`, without the module's path, with pydantic's explanation from the following lines."""
    name, text = exception[1].rpartition(".")[2], (exception[2] or "").strip()
    if name == "ValidationError" and number + 1 < len(lines):
        text = lines[number + 1].strip().partition(" [type=")[0].removeprefix("Value error, ")
    return f"{name}: {text}" if text else name
