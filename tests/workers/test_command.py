"""`python -m workers.emulator` as a process."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.examples import at_night_but
from tests.workers.conftest import body


def start(*arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """The process and the address that it printed."""
    command = [sys.executable, "-m", "workers.emulator", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.search(r"http://\S+", process.stdout.readline())
    assert match
    return process, match[0]


def stop(process: "subprocess.Popen[str]", number: signal.Signals) -> int:
    process.send_signal(number)
    with process:
        return process.wait(timeout=20)


@pytest.mark.parametrize("number", at_night_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_fleet_is_made_by_its_admin_surface(number: signal.Signals) -> None:
    process, url = start()
    for name, given in (("a", body()), ("b", body(model="other"))):
        put = urllib.request.Request(f"{url}/emulator/instances/{name}", json.dumps(given).encode(), method="PUT")
        assert urllib.request.urlopen(put).status == 200
    with urllib.request.urlopen(f"{url}/emulator/instances") as response:
        listed = json.load(response)["instances"]
    assert [(instance["name"], instance["model"]) for instance in listed] == [("a", "m"), ("b", "other")]
    assert stop(process, number) == 0


@pytest.mark.nightly
def test_single_serves_at_the_root() -> None:
    process, url = start("--single", "m")
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        assert json.load(response)["data"][0]["id"] == "m"
    with urllib.request.urlopen(f"{url}/emulator/instances") as response:
        assert json.load(response)["instances"][0]["url"] == url
    assert stop(process, signal.SIGTERM) == 0


@pytest.mark.nightly
def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "workers.emulator", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr
