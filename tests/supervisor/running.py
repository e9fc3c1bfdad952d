"""Drives a whole stack by its own commands: `make run`, the printed sign-in link, pages, Ctrl-C.

Run as a program (`python -m tests.supervisor.running`), it tries what the README promises, on the default port and state
folder: the Overview with moving loads within a minute, `/healthz`, and a Ctrl-C that leaves nothing behind.
"""

import http.cookiejar
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
UP_WITHIN_S = 180.0
STOP_WITHIN_S = 30.0
TOKEN = "STACK_UNDER_TEST"
CSRF = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')
SIGN_IN = re.compile(r"Sign in\s+(http://\S+)")


class RunningStack:
    """`make run` with *options*, in *environment*; everything it prints is in `lines`."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.lines: list[str] = []
        self.token = secrets.token_hex(8)
        self.process = subprocess.Popen(
            self.command(" ".join(options)),
            cwd=ROOT,
            env={**os.environ, **environment, TOKEN: self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a terminal's foreground group: Ctrl-C reaches make and the supervisor
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def command(self, options: str) -> list[str]:
        return ["make", "run", f"ARGS={options}"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, what: str, condition: Callable[[], Any], within_s: float = UP_WITHIN_S) -> Any:
        """Return the first true value of *condition*. Raise AssertionError with the stack's
        output if there is none in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            try:
                if value := condition():
                    return value
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            assert self.process.poll() is None, f"the stack ended while waiting for {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} within {within_s:.0f} s:\n{self.text}"
            time.sleep(0.2)

    def wait_until_up(self) -> str:
        """Return the sign-in link that it prints last."""
        link = self.wait_for("sign-in link", lambda: SIGN_IN.search(self.text))
        self.wait_for("API line", lambda: re.search(r"\n  API ", self.text))
        return str(link[1])

    def get(self, url: str) -> str:
        with self._browser.open(url, timeout=10) as response:
            return str(response.read().decode())

    def sign_in(self, link: str) -> None:
        form = CSRF.search(self.get(link))
        assert form, "the page of the link has no form"
        data = urllib.parse.urlencode({"csrfmiddlewaretoken": form[1]}).encode()
        request = urllib.request.Request(link, data, {"Referer": link})
        self._browser.open(request, timeout=10).close()

    def summary(self, url: str) -> dict[str, Any]:
        """Return the newest live summary."""
        return dict(json.loads(self.get(f"{url}/api/summary")))

    def processes(self) -> list[str]:
        """Return every process that inherited this stack's environment."""
        listed = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{TOKEN}={self.token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_text().replace("\0", " ")
                    listed.append(f"{folder.name} {command}")
            except OSError:
                continue
        return listed

    def interrupt(self) -> int:
        """Press Ctrl-C; return the exit status of `make run`."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait_for_end()

    def wait_for_end(self) -> int:
        status = self.process.wait(STOP_WITHIN_S)
        self._reader.join(STOP_WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        """End it whatever it does, so that a failed test leaves nothing running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.wait_for_end()


def moving(stack: RunningStack, url: str) -> Callable[[], bool]:
    """Whether the output tokens per second of each of three regions were seen above 0 at two different values."""
    seen: dict[str, set[float]] = {}

    def condition() -> bool:
        instances = stack.summary(url)["instances"]
        sums: dict[str, float] = {}
        for region, rate in zip(instances["region"], instances["output_tokens_per_s"], strict=True):
            sums[region] = sums.get(region, 0.0) + (rate or 0.0)
        for region, rate in sums.items():
            if rate > 0:
                seen.setdefault(region, set()).add(rate)
        return len(seen) == 3 and all(len(rates) > 1 for rates in seen.values())

    return condition


def main() -> None:
    began = time.monotonic()
    stack = RunningStack()
    try:
        link = stack.wait_until_up()
        url = link.partition("/sign-in/")[0]
        stack.sign_in(link)
        overview = stack.get(f"{url}/")
        for region in ("us-east", "us-central", "us-west"):
            assert region in overview, f"the Overview does not show {region}"
        stack.wait_for("moving loads", moving(stack, url))
        took_s = time.monotonic() - began
        print(f"The Overview showed three regions with moving loads after {took_s:.0f} s.")
        stack.get(f"{url}/healthz")
        asked = time.monotonic()
        stack.interrupt()
        print(f"Ctrl-C ended it in {time.monotonic() - asked:.1f} s.")
        left = stack.processes()
        assert not left, f"left behind: {left}"
        assert took_s < 60, "that is longer than a minute"
    finally:
        stack.kill()
        print(stack.text)


if __name__ == "__main__":
    sys.exit(main())
