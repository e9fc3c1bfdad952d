"""Weights on this machine's disk: what vLLM would find there, and pulls of what it would not."""

import fcntl
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PULL = Path(__file__).with_name("pull.py")
BEGIN_LIMIT_S = 30.0
WEIGHTS = (".safetensors", ".bin", ".pt")


class PullError(Exception):
    """A pull cannot begin; the text says why in one sentence."""


def is_folder(source: str) -> bool:
    """Return whether *source* is a folder, and not a repository `organisation/name`."""
    return source.startswith(("/", ".", "~")) or Path(source).is_dir()


def folder_of(source: str, environment: Mapping[str, str]) -> Path:
    """Return the folder of *source*, existing or not: of a repository, its part of the hub's cache."""
    if is_folder(source):
        return Path(source).expanduser()
    home = environment.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(environment.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    return cache / f"models--{source.replace('/', '--')}"


def on_disk(source: str, environment: Mapping[str, str]) -> tuple[int, bool]:
    """Return the bytes of *source* on this machine's disk, and whether all of its weights are there."""
    folder = folder_of(source, environment)
    files = [file for file in folder.rglob("*") if not file.is_symlink() and file.is_file()]
    size = 0
    for file in files:
        with suppress(FileNotFoundError):  # a part that has just become whole
            size += file.stat().st_size
    if not is_folder(source):
        with suppress(FileNotFoundError):
            return size, _is_whole(folder / "snapshots" / (folder / "refs" / "main").read_text().strip())
        return size, False
    return size, _is_whole(folder)


def _is_whole(folder: Path) -> bool:
    """Return whether *folder* has each file that an index of weights names; without an index, whether it has weights."""
    indexes = list(folder.glob("*.index.json"))
    if indexes:
        with suppress(ValueError, LookupError, OSError):
            named = {name for index in indexes for name in json.loads(index.read_bytes())["weight_map"].values()}
            return all((folder / name).exists() for name in named)
        return False
    return any(file.suffix in WEIGHTS and file.exists() for file in folder.glob("*"))


def pull(python: str, source: str, base: Path, order: str, environment: Mapping[str, str]) -> None:
    """Begin to pull the repository *source* with *python* for *order*, unless it is being pulled. Raises PullError.

    *base* is the path of its files, without their suffixes: `.lock`, `.error` and `.log`.
    """
    if is_folder(source):
        raise PullError(f"{source} is a folder, which is copied onto a node, not pulled")
    base.parent.mkdir(parents=True, exist_ok=True)
    try:
        with base.with_suffix(".log").open("ab") as log:
            subprocess.run(
                [python, str(PULL), source, str(base), order],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=BEGIN_LIMIT_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise PullError(f"{python} cannot pull {source}: {error}") from error


def is_pulling(base: Path) -> bool:
    """Return whether a process pulls to *base*."""
    try:
        with base.with_suffix(".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def last_order(base: Path) -> str:
    """Return the order that the last pull carried out; "" for none."""
    with suppress(FileNotFoundError):
        return base.with_suffix(".lock").read_text()
    return ""


def pull_error(base: Path) -> str:
    """Return the error of the last pull; "" for none."""
    with suppress(FileNotFoundError):
        return base.with_suffix(".error").read_text()
    return ""
