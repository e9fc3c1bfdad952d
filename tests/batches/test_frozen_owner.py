"""The process that executes a batch is killed, or frozen and comes back, while another goes on. D26, B5."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import psycopg
import pytest

from tests.postgres import cluster
from tests.redis_server import RedisServer
from tests.supervisor.test_up import ROOT, free_port

pytestmark = [pytest.mark.services, pytest.mark.nightly]

LINES = 300
FROZEN_S = 30.0
WITHIN_S = 240.0

ROWS = """
    from types import SimpleNamespace
    from django.core.files.base import ContentFile
    from controlplane.accounts.models import ApiKey
    from controlplane.batches import services
    from tests.gateway.rows import make_rows
    backend = SimpleNamespace(name="m-0", url=values["url"])
    make_rows([backend], regions=["east"], max_num_seqs=16, queue_bound=1000)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    text = "".join(json.dumps(line | {"custom_id": f"{at}"}) + "\\n" for at in range(values["lines"]))
    key = ApiKey.objects.select_related("tenant").get()
    file = services.create_file(key.tenant, ContentFile(text.encode(), "in.jsonl"), "in.jsonl", "batch")
    batch = services.create_batch(key, file, "/v1/chat/completions", "24h")
    services.validate_batch(batch.pk)
    answer = batch.pk
"""
FILES = """
    from controlplane.batches import services
    from controlplane.batches.models import Batch
    services.finish_batch(values["batch"])
    batch = Batch.objects.get(pk=values["batch"])
    answer = {"usage": batch.to_dict()["usage"], "output": batch.output_file.content.read().decode(), "status": batch.status}
"""


class Stack:
    """PostgreSQL, Redis, an emulated instance and web processes of one state folder."""

    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PILOTHOUSE_")} | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_SECRET_KEY": "of-a-test",
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.log = (folder / "web.log").open("w+")
        self.rows = psycopg.connect(database_url, autocommit=True)

    def manage(self, *words: str) -> str:
        command = [sys.executable, "manage.py", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shell(self, code: str, **values: object) -> object:
        code = f"import json\nvalues = json.loads({json.dumps(values)!r})\n" + textwrap.dedent(code)
        said = self.manage("shell", "--no-imports", "-c", code + "\nprint(json.dumps(answer, default=str))")
        return json.loads(said.strip().splitlines()[-1])

    def start(self, *words: str, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, env=self.environment, text=True, stderr=self.log, **options
        )
        self.processes.append(process)
        return process

    def web(self) -> tuple[subprocess.Popen[str], int]:
        port = free_port()
        options = ["--port", str(port), "--lifespan", "on", "--http", "controlplane.listening:HttpProtocol"]
        process = self.start("uvicorn", "controlplane.asgi:application", "--no-access-log", *options)
        until(lambda: checks_of(port), 120)
        return process, port

    def one(self, query: str) -> tuple:
        return self.rows.execute(query).fetchone() or ()

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()
        self.rows.close()
        self.log.seek(0)
        print(self.log.read()[-6000:])
        self.log.close()


def checks_of(port: int) -> dict:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as response:
            return json.load(response)["checks"]
    except urllib.error.HTTPError as error:
        return json.load(error)["checks"]
    except OSError:
        return {}


def until(condition, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.2)


@pytest.fixture
def stack(tmp_path):
    redis = RedisServer().start()
    with cluster() as url:
        stack = Stack(tmp_path, url, redis.url)
        try:
            yield stack
        finally:
            stack.stop()
            redis.stop()


@pytest.mark.parametrize("killed", [False, True])
def test_each_line_is_answered_and_paid_once(stack, killed):
    emulator = stack.start("workers.emulator", "--port", "0", "--single", "m", stdout=subprocess.PIPE)
    url = emulator.stdout.readline().rsplit("http://", 1)[1].split()[0].rstrip("/")
    stack.manage("migrate", "--verbosity", "0")
    batch = stack.shell(ROWS, url=f"http://{url}", lines=LINES)
    frozen, port = stack.web()
    assert checks_of(port)["lease"] == "ok"
    _, other_port = stack.web()
    assert checks_of(other_port)["lease"] != "ok"

    def done() -> int:
        return stack.one(f"SELECT completed + failed FROM batches_batch WHERE id = {batch}")[0]

    until(lambda: done() >= LINES / 6, WITHIN_S)
    frozen.send_signal(signal.SIGKILL if killed else signal.SIGSTOP)
    frozen_s, at = time.monotonic(), done()
    until(lambda: done() > at + 10, WITHIN_S)
    if not killed:
        assert done() < LINES, "it comes back before the end"
        time.sleep(max(0.0, frozen_s + FROZEN_S - time.monotonic()))
        print(f"frozen at {at}, back at {done()}")
        frozen.send_signal(signal.SIGCONT)
    until(lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}")[0] == "finalizing", WITHIN_S)
    time.sleep(5.0)  # rows of lost executions
    ended = stack.shell(FILES, batch=batch)
    answers = [json.loads(line) for line in ended["output"].splitlines()]
    assert ended["status"] == "completed"
    assert sorted(one["custom_id"] for one in answers) == sorted(f"{at}" for at in range(LINES))
    counted = stack.rows.execute(
        "SELECT lost, count(*), count(DISTINCT request_id), sum(prompt_tokens), sum(output_tokens), max(outcome) "
        "FROM gateway_ledgerrow GROUP BY lost ORDER BY lost"
    ).fetchall()
    print(counted)
    _, rows, lines, prompt_tokens, output_tokens, _ = counted[0]
    assert rows == lines == LINES, "each is paid once"
    assert ended["usage"]["input_tokens"] == prompt_tokens
    assert ended["usage"]["output_tokens"] == output_tokens == LINES * 60
    assert {checks_of(each)["tasks"] for each in (other_port, *(() if killed else (port,)))} == {"ok"}
    (epoch,) = stack.one(f"SELECT epoch FROM batches_batch WHERE id = {batch}")
    assert epoch >= 2
