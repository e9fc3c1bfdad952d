"""A whole stack with emulated servers: a model is deployed by one form, and the plan of a what-if moves the fleet."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import PHONE, keep
from tests.e2e.console_server import ROOT, free_port, wait_until
from tests.e2e.test_accessibility import violations

STARTS_WITHIN_S, READY_WITHIN_MS = 240, 120_000
MOVED = "llama-3.2-3b"
APPROVE = (
    "from controlplane.accounts.models import User; from controlplane.planning import services; "
    "from controlplane.planning.models import WHAT_IF, ScalingPlan; "
    f"plan = ScalingPlan.objects.get(status='advice', strategy=WHAT_IF, model__name='{MOVED}'); "
    "services.approve(plan, User.objects.get(username='operator'))"
)
COUNT = (
    "from controlplane.fleet.models import Instance; here = Instance.objects.filter(deployment__region__name='us-east');"
    f"print(here.filter(state='ready', deployment__model__name='{MOVED}').count())"
)
"""A command that prints how many instances of it are ready in US East."""
FORM = {
    "Region": "us-east", "GPU type": "h100-80gb", "GPUs of a new node": "8", "Model": "qwen3-8b",
    "Parameters (billions)": "8.2", "Layers": "36", "KV heads": "8", "Head size": "128", "Context (tokens)": "32768",
    "Reason": "asked for by Acme",
}  # fmt: skip


class Stack:
    """`manage.py up` with the demo's rows and no traffic, and commands alongside it."""

    def __init__(self, folder) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PILOTHOUSE_", "DJANGO_"))}
        kept.pop("DATABASE_URL", None), kept.pop("REDIS_URL", None)
        self.env = kept | {"PILOTHOUSE_STATE_DIR": str(folder), "PILOTHOUSE_EMULATOR_PORT": str(free_port())}
        self.process = None

    def start(self) -> None:
        command = [sys.executable, "manage.py", "up", "--port", str(self.port), "--no-traffic"]
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self.serves, STARTS_WITHIN_S)

    def serves(self) -> bool:
        assert self.process.poll() is None, (self.folder / "up.log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def says(self, *command: str) -> str:
        called = [sys.executable, "manage.py", *command]
        return subprocess.run(
            called, cwd=ROOT, env=self.env, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(30)


@pytest.fixture(scope="module")
def stack(tools, tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def signed_in(stack, open_page):
    link = stack.says("sign_in_link", "operator", "--url", stack.url).strip()
    page = open_page(stack, link.removeprefix(stack.url), user=None)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/sign-in/" not in url)
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(console, open_page, theme):
    page = open_page(console, "/models/deploy/", theme=theme)
    fill(page)
    expect(page.locator("#estimate")).to_contain_text("16.4 GB")
    violated = violations(page)
    keep(page, f"deploy-{theme}-1440")
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(300)
    violated += violations(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keep(page, f"deploy-{theme}-390")
    assert violated == []


def fill(page) -> None:
    for folded in ("Sizes by hand", "Another region or GPU type, or a new node"):
        page.get_by_text(folded, exact=True).click()
    for label, value in FORM.items():
        page.get_by_label(label, exact=True).fill(value)


@pytest.mark.gate
def test_one_form_to_the_first_token(stack, open_page):
    page = signed_in(stack, open_page)
    page.goto("/models/")
    page.get_by_role("link", name="Deploy a model").click()
    fill(page)
    expect(page.locator("#estimate")).to_contain_text("413.1k tokens")
    keep(page, "deploy-filled")
    page.get_by_role("button", name="Deploy").click()
    expect(page.get_by_role("heading", name="Ready", exact=True)).to_be_visible(timeout=READY_WITHIN_MS)
    keep(page, "deployed")
    assert violations(page) == []
    curl = page.locator("#curl").text_content()
    key = re.search(r"ph_\S+", stack.says("create_key", "acme", "--name", "first token"))[0]
    env = os.environ | {"PILOTHOUSE_API_KEY": key}
    answer = subprocess.run(["bash", "-c", curl], env=env, check=True, capture_output=True, text=True, timeout=60)
    assert '"content"' in answer.stdout
    page.goto("/models/qwen3-8b/")
    expect(page.locator("#endpoints")).to_contain_text("speed estimated")
    keep(page, "models-after-deploy")


@pytest.mark.gate
def test_a_prompt_goes_through_the_gateway_and_its_decision_is_shown(stack, open_page):
    page = signed_in(stack, open_page)
    page.goto("/playground/")
    page.get_by_label("Model", exact=True).fill(MOVED)
    for stream in (True, False):
        page.get_by_label("Stream the answer").set_checked(stream)
        page.get_by_label("Max tokens").fill("40")
        page.get_by_role("button", name="Send").click()
        status = page.locator("[data-said]")
        expect(status).to_contain_text("First token after" if stream else "Answered after", timeout=READY_WITHIN_MS)
        expect(page.locator("[data-answer]")).not_to_be_empty()
        expect(page.locator("[data-decision]")).to_contain_text("Predicted length")
        expect(page.locator("[data-decision]")).to_contain_text(MOVED.replace(".", "-"))
        keep(page, f"playground-{'stream' if stream else 'whole'}")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keep(page, "playground-phone")
    assert violations(page) == []
    page.get_by_role("link", name="Why this instance").click()
    expect(page.get_by_role("heading", name="Why this instance")).to_be_visible()


@pytest.mark.gate
def test_a_plan_of_a_what_if_moves_an_instance(stack, open_page):
    """From the page through the gateway's fork and Celery to an emulated server that starts, by an admin, who may change
    bounds; no row is written by hand."""
    page = signed_in(stack, open_page)
    length = {"median": 150, "p95": 450}
    tenant = {"tenant": "new", "model": MOVED, "slo_class": "interactive", "requests_per_s": 0.5}
    tenant |= {"prompt": length, "output": length}
    edits = quote(json.dumps({"edits": [{"kind": "tenant", "client": tenant}]}))
    page.goto(f"/what-if/new?horizon=600&seeds=1&chosen=yes&advanced={edits}")
    page.get_by_role("button", name="+ Bound").click()
    page.get_by_label("Bounds: Model").select_option(MOVED)
    page.get_by_label("Bounds: Region").select_option("us-east")
    before = int(stack.says("shell", "-v", "0", "-c", COUNT))
    page.get_by_label("Bounds: Min instances").fill(str(before + 1))
    page.get_by_label("Bounds: Max instances").fill(str(before + 2))
    side = page.locator("#what-if-side")
    expect(side).to_contain_text(f"{MOVED} min", timeout=READY_WITHIN_MS)
    page.get_by_role("button", name="Run 2 futures").click()
    run = page.locator("#what-if-run")
    expect(run).to_contain_text("Done", timeout=READY_WITHIN_MS)
    page.keyboard.press("2")
    page.get_by_role("button", name="Make this the plan").click()
    dialog = page.get_by_role("dialog", name=f"Make B, {MOVED} min")
    for box in dialog.get_by_role("checkbox").all():  # asked twice where it keeps its promises seldom
        box.check()
    dialog.get_by_label("Reason").fill("one more for the evening")
    dialog.get_by_role("button", name="Make it the plan").click()
    expect(page.locator(".choice")).to_contain_text("B became the plan, by")
    stack.says("shell", "-v", "0", "-c", APPROVE)
    until_s = time.monotonic() + READY_WITHIN_MS / 1000
    while int(stack.says("shell", "-v", "0", "-c", COUNT)) != before + 1:
        assert time.monotonic() < until_s
        time.sleep(2)
