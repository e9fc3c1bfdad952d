"""The state folder: a key that stays, and one supervisor at a time."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from controlplane.supervisor.state import FolderHeldError, hold, holder, keep_secret_key, write_private

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PILOTHOUSE_STATE_DIR", str(tmp_path / "var"))
    monkeypatch.delenv("PILOTHOUSE_SECRET_KEY", raising=False)


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    keep_secret_key(ROOT)
    path = tmp_path / "var" / "secret_key"
    first = path.read_text()
    assert len(first.strip()) >= 50
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keep_secret_key(ROOT)
    assert path.read_text() == first


def test_no_key_is_made_where_the_environment_gives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTHOUSE_SECRET_KEY", "mine")
    keep_secret_key(ROOT)
    assert not (tmp_path / "var" / "secret_key").exists()


def test_private_files_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_supervisor_says_who_runs(tmp_path: Path) -> None:
    with hold(tmp_path, "http://127.0.0.1:8000"):
        with pytest.raises(FolderHeldError) as caught, hold(tmp_path, "http://127.0.0.1:9000"):
            pass
        assert f"process {os.getpid()}, http://127.0.0.1:8000, since" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
    with hold(tmp_path, "http://127.0.0.1:9000"):
        pass


def test_a_supervisor_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    source = (
        "import os, pathlib, sys\n"
        "from controlplane.supervisor.state import hold\n"
        "with hold(pathlib.Path(sys.argv[1]), 'http://gone'):\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", source, str(tmp_path)], cwd=ROOT, check=False).returncode == 9
    with hold(tmp_path, "http://here"):
        assert "http://here" in (tmp_path / "up.lock").read_text()


def test_who_holds_a_folder_is_known(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with hold(tmp_path, "http://here"):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None


def test_a_restart_needs_a_stack_and_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "STATE_DIR", tmp_path)
    with pytest.raises(CommandError, match=r"^No `manage\.py up` runs in /"):
        call_command("restart")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for result in ("", "relay-1 failed"):
            signal.signal(signal.SIGUSR1, lambda *_, result=result: (tmp_path / "restart").write_text(result))
            with hold(tmp_path, "http://here"), pytest.raises(CommandError, match=result) if result else nullcontext():
                call_command("restart")
    finally:
        signal.signal(signal.SIGUSR1, before)


def manage(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `manage.py` as a user does, without the settings of the test run."""
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "manage.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_settings_load_with_the_key_that_was_made() -> None:
    """Do what `manage.py up` does before Django: without the file, settings refuse to load."""
    said = manage("up", "--help")
    assert said.returncode == 0, said.stderr
    assert "--no-demo" in said.stdout


def test_a_wrong_variable_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTHOUSE_STATE_DIRECTORY", "x")
    said = manage("up", "--help")
    assert said.returncode == 1
    assert (
        said.stderr == "Unknown environment variables: PILOTHOUSE_STATE_DIRECTORY. See docs/operate/configuration.md.\n"
    )
