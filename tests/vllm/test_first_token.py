"""The way of docs/operate/operations.md from nothing to the first token, with its own file and commands, and real vLLM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ROOT

PAGE = (ROOT / "docs/operate/operations.md").read_text()
SECTION = PAGE.partition("## From nothing to the first token\n")[2].partition("\n## ")[0]
PORT = int(os.environ.get("FIRST_TOKEN_PORT", "8364"))
URL = f"http://127.0.0.1:{PORT}"
UP_LIMIT_S, TOKEN_LIMIT_S = 240.0, 300.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def commands() -> list[str]:
    """Return the documented `manage.py` commands, in order."""
    text = "\n".join(blocks("sh"))
    return [line.strip(" )") for line in re.findall(r"manage\.py ([^#\n]+)", text)]


@dataclass
class Here:
    """A folder in which the documented commands run."""

    folder: Path
    environment: dict[str, str]

    def manage(self, command: str) -> str:
        words = [sys.executable, str(ROOT / "manage.py"), *command.split()]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        return done.stdout

    def log(self) -> str:
        logs = sorted((self.folder / "var/instances").glob("*.log"))
        return (
            "".join(f"{log.name}:\n{log.read_text()[-2000:]}\n" for log in logs)
            + (self.folder / "up.log").read_text()[-3000:]
        )


@pytest.fixture
def here(vllm_python: str, tmp_path: Path) -> Iterator[Here]:
    """Run `manage.py up --no-demo` in a new folder; everything it started ends with it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PILOTHOUSE_", "DJANGO_"))}
    for name in ("DATABASE_URL", "REDIS_URL"):
        ours.pop(name, None)
    environment = {
        **ours,
        "PILOTHOUSE_STATE_DIR": str(tmp_path / "var"),
        "PILOTHOUSE_EMULATOR_PORT": str(PORT + 1),
        "VLLM_PYTHON": vllm_python,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    place = Here(tmp_path, environment)
    up = [sys.executable, str(ROOT / "manage.py"), *commands()[0].split(), "--port", str(PORT)]
    with (tmp_path / "up.log").open("w") as log:
        process = subprocess.Popen(up, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + UP_LIMIT_S
        while not answers(f"{URL}/healthz"):
            said = (tmp_path / "up.log").read_text()
            assert process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        yield place
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def stream(key: str) -> list[dict[str, Any]]:
    """Return the events of the documented request, until its end."""
    body = re.search(r"-d '(.*?)'", SECTION, re.DOTALL)
    assert body is not None
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/completions", data=body[1].encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=TOKEN_LIMIT_S) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_the_page_names_every_step() -> None:
    assert [command.split()[0] for command in commands()] == ["up", "apply", "create_key"]
    (text,) = blocks("toml")
    assert len(tomllib.loads(text)["instances"]) == 2


@pytest.mark.vllm
def test_the_first_token(here: Here, vllm_python: str) -> None:
    (here.folder / "FLEET.toml").write_text(blocks("toml")[0])
    _, apply, create_key = commands()
    assert "-m workers.vllm.tiny_model var/tiny " in SECTION
    model = [vllm_python, "-m", "workers.vllm.tiny_model", str(here.folder / "var/tiny")]
    subprocess.run(model, cwd=ROOT, env=here.environment, check=True)
    assert "instance tiny-2" in here.manage(apply)
    assert "Nothing to change" in here.manage(apply)
    key = here.manage(create_key).split()[-1]
    began = time.monotonic()
    try:
        events = stream(key)
    except OSError as error:
        pytest.fail(f"{error}\n{here.log()}")
    sys.stdout.write(f"first answer {time.monotonic() - began:.0f} s after `apply`\n")
    tokens = [choice for event in events for choice in event.get("choices", [])]
    assert len(tokens) >= 1, events
    assert tokens[-1]["finish_reason"] in {"length", "stop"}
