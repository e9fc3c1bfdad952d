"""Whether a GPU is to blame for the end of a vLLM server, by its last words.

The words are those of the CUDA runtime (as PyTorch and vLLM repeat them), of NCCL, of `nvidia-smi` and of the kernel module
(NVRM); numbers of Xid errors are judged by NVIDIA's Xid catalog.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workers.vllm.engine_log import MAX_ERROR, PREFIX, STAMP, root_error


class Blame(StrEnum):
    """Who is to blame."""

    GPU = "gpu"
    SUSPECT = "suspect"
    """Perhaps a GPU: a second model that fails there decides."""
    OTHER = "other"
    """The model, its settings, its node or its build."""


LAST_WORDS: tuple[tuple[re.Pattern[str], Blame], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), blame)
    for pattern, blame in (
        # Reset, restart of the node, or repair by NVIDIA's catalog.
        (r"Xid \([^)]*\): (?:48|62|64|74|79|9[45]|110|119|120|136|14[0-9]|15[1-8])\b", Blame.GPU),
        (r"Xid \([^)]*\): \d+", Blame.OTHER),  # others are errors of programs, or remarks
        (r"uncorrectable (?:ECC|NVLink) error|ECC_?Uncorrectable|NVLINK_?Uncorrectable", Blame.GPU),
        (r"fallen off the bus|GPU is lost|GPU requires reset|Unable to determine the device handle for GPU", Blame.GPU),
        (r"CUDA error: hardware stack error|CUDA_ERROR_HARDWARE_STACK", Blame.GPU),
        # About memory that others hold, the build, the driver, or the program.
        (
            r"out of memory|Free memory on device|No available memory for the cache|larger than the available KV",
            Blame.OTHER,
        ),
        (r"device-side assert|no kernel image|forward compatibility|driver version|driver on your system", Blame.OTHER),
        (r"invalid device (?:ordinal|function)", Blame.OTHER),
        (r"CUDA|NCCL|CUBLAS|cuDNN|NVML", Blame.SUSPECT),
        # That a process ended, without its reason.
        (r"(?:died|exited) unexpectedly|EngineDeadError|EngineCore encountered|initialization failed", Blame.SUSPECT),
    )
)
"""(words, who is to blame); the first that fits counts. Another error is not a GPU's, and none at all is suspect."""
ADDRESS = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?\b", re.IGNORECASE)
RANK = re.compile(r"Worker_(?:\w+_)?TP(\d+)|VllmWorker rank=(\d+)|^\[rank(\d+)\]|\bcuda:(\d+)\b|\bGPU(\d+)\b")


@dataclass(frozen=True, slots=True)
class Verdict:
    """*gpus* are those that may be to blame, *words* the line that says so."""

    blame: Blame
    gpus: tuple[str, ...] = ()
    words: str = ""


def judge(log: str, gpus: Sequence[str], by_address: Mapping[str, str] | None = None, how: str = "") -> Verdict:
    """Return who is to blame for the end of a server that had *gpus*, by the end of its *log*.

    *by_address* are the names of the node's GPUs by `address_of`; *how* is how its process ended, as the launcher says.
    A GPU that one line names is meant alone. Where an error of a GPU names none of several, all of them are suspect.
    """
    if not gpus:
        return Verdict(Blame.OTHER)
    for line in log.splitlines():
        if blame_of(line) == Blame.GPU:
            named = _named(line, gpus, by_address or {})
            bad = named if named or len(gpus) > 1 else tuple(gpus)
            return Verdict(Blame.GPU if bad else Blame.SUSPECT, bad or tuple(gpus), _words(line))
    error = root_error(log)
    if not error and how.startswith("killed"):  # by the kernel or a person
        return Verdict(Blame.OTHER, (), how)
    if error:
        blame = blame_of(error) or Blame.OTHER
    else:
        known = [each for line in log.splitlines() if (each := blame_of(line))]
        blame = known[-1] if known else Blame.SUSPECT
    return Verdict(blame, tuple(gpus) if blame == Blame.SUSPECT else (), error or how or "it ended without a word")


def blame_of(line: str) -> Blame | None:
    """Return who is to blame by *line* alone; None where the table does not know it."""
    return next((blame for pattern, blame in LAST_WORDS if pattern.search(line)), None)


def address_of(text: str) -> str:
    """Return the PCI address in *text* in one form, without leading zeros and function; "" for none."""
    found = ADDRESS.search(text)
    return f"{int(found[1], 16):x}:{found[2]}:{found[3]}".lower() if found else ""


def about(messages: str, gpus: Sequence[str], by_address: Mapping[str, str]) -> str:
    """Return those lines of the driver's *messages* that name one of *gpus* by its address: others are of other servers."""
    return "".join(f"{line}\n" for line in messages.splitlines() if by_address.get(address_of(line)) in gpus)


def _named(line: str, gpus: Sequence[str], by_address: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPU that *line* names by its address on the bus, or by its rank among *gpus*; none if it names none."""
    if (name := by_address.get(address_of(line))) is not None:
        return (name,)
    if rank := RANK.search(line):
        number = int(next(filter(None, rank.groups())))
        return tuple(gpus[number : number + 1])
    return ()


def _words(line: str) -> str:
    return STAMP.sub("", PREFIX.sub("", line)).strip()[:MAX_ERROR]
