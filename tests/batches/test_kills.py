"""Web, worker and Redis are killed in the middle of a batch: each line is answered once all the same. A whole stack.

The web process is also killed while instances are donated, one is reclaimed and one redeployed.
"""

import io
import json
import os
import signal
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import openai
import pytest

from controlplane.supervisor.state import PARTS_FILE
from tests.postgres import cluster
from tests.supervisor.running import RunningStack
from tests.supervisor.test_up import Address

pytestmark = [pytest.mark.services, pytest.mark.nightly]

LINES = 600
MODEL = "llama-3.2-3b"
WITHIN_S = 240.0


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def address(request, tmp_path_factory):
    address = Address(tmp_path_factory.mktemp("batch"))
    with cluster() if request.param == "postgresql" else nullcontext("") as url:
        address.environment["DATABASE_URL"] = url
        yield address


@pytest.fixture(scope="module")
def stack(address):
    environment = {**address.environment, "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    stack = RunningStack(f"--port {address.port} --no-traffic", **environment)
    try:
        stack.wait_until_up()
        yield stack
    finally:
        stack.kill()


@pytest.fixture(scope="module")
def client(stack, address):
    key = shell(
        address,
        """
        from controlplane.accounts.models import Tenant
        from controlplane.accounts.services import create_api_key
        answer = create_api_key(Tenant.objects.get(name="globex"), "batch", "a test")[1]
        """,
    )
    with openai.OpenAI(base_url=f"http://127.0.0.1:{address.port}/v1", api_key=key, max_retries=30) as client:
        yield client


def shell(address, code, **values):
    """Run *code* with *values* in the stack's rows; return what it calls `answer`."""
    given = f"import json\nvalues = json.loads({json.dumps(values)!r})\n"
    code = textwrap.dedent(code).strip() + "\nprint(json.dumps(answer, default=str))"
    said = address.manage("shell", "--no-imports", "-c", given + code)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.strip().splitlines()[-1])


def kill(address, part):
    """End *part* at once, as soon as it runs; the supervisor starts it again."""
    until_s = time.monotonic() + 60
    while True:
        parts = json.loads((Path(address.environment["PILOTHOUSE_STATE_DIR"]) / PARTS_FILE).read_text())
        (process_id,) = [one["process_id"] for one in parts if one["name"] == part]
        if process_id is not None:
            break
        assert time.monotonic() < until_s, f"{part} was not started again"
        time.sleep(0.1)
    os.kill(process_id, signal.SIGKILL)


def test_each_line_is_answered_once_whatever_dies(stack, client, address):
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 60},
        }
        for number in range(LINES)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h")
    parts = ["web", "celery", "redis"]
    until_s = time.monotonic() + WITHIN_S
    while batch.status not in ("completed", "failed", "expired"):
        assert time.monotonic() < until_s, batch
        time.sleep(0.2)
        try:
            batch = client.batches.retrieve(batch.id)
        except openai.APIError:
            continue
        done = batch.request_counts.completed if batch.request_counts else 0
        if parts and done > LINES * (1 + 3 - len(parts)) / 5:
            kill(address, parts.pop(0))
    assert parts == []
    assert batch.status == "completed"
    answers = client.files.content(batch.output_file_id).text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in answers) == sorted(f"line-{n}" for n in range(LINES))
    assert "Traceback" not in stack.text


GIVING, TAKING = "llama-3.2-3b", "llama-3.1-8b"
"""Models with instances on the same GPUs: the second one takes over one of the first."""
KEEPS, BACK, AWAY = "us-east", "us-central", "us-west"
"""Regions whose instance stays donated, is reclaimed, and is redeployed."""

LET_GO = """
    from controlplane.fleet.models import Model
    from controlplane.planning.execution import executor
    from controlplane.planning.execution.executor import Why
    from controlplane.planning.models import MoveSource, PolicyMode
    from controlplane.planning.services import set_policy
    for name in values["models"]:
        policy = Model.objects.get(name=name).scaling_policy
        set_policy(policy.model, policy.strategy, PolicyMode.OFF, {}, "test", "moves are the test's alone")
    why = Why(MoveSource.PLAN, "", "the plan asks for one fewer")
    answer = {region: executor.remove(values["models"][0], region, why).instance for region in values["regions"]}
"""
ADD = """
    from controlplane.planning.execution import executor
    from controlplane.planning.execution.executor import Why
    from controlplane.planning.models import MoveSource
    why = Why(MoveSource.PLAN, "", "the plan asks for one more")
    answer = executor.add(values["model"], values["region"], why).instance
"""
STATES = """
    from controlplane.fleet.models import Donation, Instance
    answer = {
        "instances": dict(Instance.objects.values_list("name", "state")),
        "donations": {
            one.instance.name: (one.state, one.taken_for and one.taken_for.model.name, one.reclaim_s)
            for one in Donation.objects.select_related("instance", "taken_for__model")
        },
    }
"""
ROWS = """
    from controlplane.gateway.models import LedgerRow
    rows = LedgerRow.objects.filter(slo_class="opportunistic")
    answer = list(rows.values_list("request_id", "outcome", "instance"))
"""


def until_states(address, within_s, **wanted):
    """Return rows of instances and donations once each instance in *wanted* has its state."""
    until_s = time.monotonic() + within_s
    while True:
        rows = shell(address, STATES)
        if all(rows["instances"].get(name) == state for name, state in wanted.items()):
            return rows
        assert time.monotonic() < until_s, (wanted, rows)


class Asking:
    """Callers who ask for opportunistic answers, one after the other, and try what broke under another id."""

    CALLERS = 12

    def __init__(self, client):
        self.client, self.asked, self.answered, self.broke = client, 0, set(), 0
        self.stop, self._lock = threading.Event(), threading.Lock()
        self._pool = ThreadPoolExecutor(self.CALLERS)
        self._running = [self._pool.submit(self._ask) for _ in range(self.CALLERS)]

    def _ask(self):
        while not self.stop.is_set():
            with self._lock:
                self.asked += 1
                number = self.asked
            attempt, answer = 0, None
            while answer is None:
                request_id = f"opportunistic-{number}-{attempt}"
                attempt += 1
                try:
                    answer = self.client.with_options(max_retries=0, timeout=60).completions.create(
                        model=GIVING, prompt=f"say {number}", max_tokens=300,
                        extra_headers={"X-SLO-Class": "opportunistic", "X-Request-Id": request_id},
                    )  # fmt: skip
                except openai.APIError:
                    with self._lock:
                        self.broke += 1
                    assert attempt < 300, "no answer after so many attempts"
                    time.sleep(0.5)
            with self._lock:
                self.answered.add(request_id)

    def end(self):
        self.stop.set()
        for each in self._running:
            each.result(120)
        self._pool.shutdown()


def test_what_is_donated_outlives_a_killed_gateway(stack, client, address):
    let_go = shell(address, LET_GO, models=[GIVING, TAKING], regions=[KEEPS, BACK, AWAY])
    kept, back, away = let_go[KEEPS], let_go[BACK], let_go[AWAY]
    until_states(address, 60, **dict.fromkeys(let_go.values(), "donated"))
    asking = Asking(client)
    try:
        until_s = time.monotonic() + 60
        while len(asking.answered) < 2 * Asking.CALLERS:
            assert time.monotonic() < until_s, (asking.asked, asking.broke)
            time.sleep(0.1)

        kill(address, "web")  # while three are donated
        rows = until_states(address, 60, **dict.fromkeys(let_go.values(), "donated"))
        assert {rows["donations"][name][0] for name in let_go.values()} == {"donated"}
        answered = len(asking.answered)
        while len(asking.answered) < answered + 2 * Asking.CALLERS:
            assert time.monotonic() < until_s + 60, (asking.asked, asking.broke)
            time.sleep(0.1)

        assert shell(address, ADD, model=GIVING, region=BACK) == back
        kill(address, "web")  # while one is reclaimed
        rows = until_states(address, 90, **{kept: "donated", back: "ready", away: "donated"})
        assert rows["donations"][back][0] == "reclaimed"

        taker = shell(address, ADD, model=TAKING, region=AWAY)
        kill(address, "web")  # while the GPUs of one are given to another model
        rows = until_states(address, 240, **{kept: "donated", back: "ready", away: "stopped", taker: "ready"})
    finally:
        asking.end()
    assert rows["donations"][kept] == ["donated", None, None]
    assert rows["donations"][back][:2] == ["reclaimed", GIVING]
    assert rows["donations"][away][:2] == ["redeployed", TAKING]
    assert rows["donations"][back][2] > 0, "how long it took"
    assert len(asking.answered) == asking.asked, "each is answered in the end"
    assert asking.broke, "some ran while the process was killed"
    until_s = time.monotonic() + 30
    while True:  # rows are written in batches
        ledger = shell(address, ROWS)
        if {one for one, _, _ in ledger} >= asking.answered or time.monotonic() > until_s:
            break
    ids = [one for one, _, _ in ledger]
    assert len(ids) == len(set(ids)), "none is in the ledger twice"
    done = {one for one, outcome, _ in ledger if outcome == "done"}
    assert asking.answered <= done, "what was answered is in the ledger"
    assert {instance for *_, instance in ledger} & {kept, back, away}, "donated instances served them"
    assert "Traceback" not in stack.text
