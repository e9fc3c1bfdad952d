"""What every actuator does, and which one a backend has."""

import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from workers.vllm.processes import started_ticks

PORT: Final = "{port}"
"""Stands in a command for the port that it is to listen on."""
POLL_S: Final = 0.05
HOST: Final = "127.0.0.1"


class ActuatorError(Exception):
    """A backend could not be started; the message says why."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """How to start a backend."""

    name: str
    image: str = ""
    """Of a container; without one it is a process of this machine."""
    command: str = ""
    """As for a shell, but without one. A process listens on `PORT`; a container with an image needs none."""
    container_port: int = 0
    """Port that a container listens on; 0 for none."""
    start_limit_s: float = 60.0

    @property
    def arguments(self) -> list[str]:
        """Return the command as a list. Raises ActuatorError if quotes do not match."""
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ActuatorError(f"the command of {self.name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Started:
    """A backend that is ready."""

    handle: str
    """Process id, or id of the container."""
    address: str
    """Host and port where it listens; empty without a port."""


class Actuator(Protocol):
    """Starts and ends backends. Each call blocks."""

    def start(self, spec: BackendSpec) -> Started:
        """Start a backend and wait until it is ready. Raises ActuatorError; then nothing of it is left."""

    def runs(self, handle: str) -> bool:
        """Whether the backend still runs."""

    def stop(self, handle: str) -> None:
        """End the backend; one that has ended is taken as ended."""

    def sweep(self) -> int:
        """End what a process of this installation left behind when it died; return how many."""


def owner_of(installation: str) -> str:
    """Return the mark of what this process of *installation* starts."""
    return f"{installation}:{os.getpid()}:{started_ticks(os.getpid())}"


def is_left_behind(mark: str, owner: str) -> bool:
    """Whether *mark* is that of another process of the installation of *owner*, which lives no longer."""
    installation, process_id, ticks = mark.rsplit(":", 2) if mark.count(":") > 1 else ("", "0", "0")
    if mark == owner or installation != owner.rsplit(":", 2)[0] or not (process_id + ticks).isdigit():
        return False
    return started_ticks(int(process_id)) != int(ticks)


def listens(address: str) -> bool:
    """Whether a server accepts connections at *address*."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def has_docker(path: str) -> bool:
    """Whether a Docker daemon may listen on the socket *path*."""
    return bool(path) and Path(path).is_socket()
