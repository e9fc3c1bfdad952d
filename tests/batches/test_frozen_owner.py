"""The process that executes a batch is killed, or frozen and comes back, while another goes on. D26, B5."""

import json
import signal
import time

import pytest

from tests.postgres import cluster
from tests.processes import Stack, checks_of, until
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.nightly]

LINES = 300
MANY, FEW_TOKENS = 10_000, 8
FROZEN_S = 30.0
WITHIN_S = 240.0

ROWS = """
    from types import SimpleNamespace
    from django.core.files.base import ContentFile
    from controlplane.accounts.models import ApiKey
    from controlplane.batches import services
    from tests.gateway.rows import make_rows
    backend = SimpleNamespace(name="m-0", url=values["url"])
    make_rows([backend], regions=["east"], max_num_seqs=values["sequences"], queue_bound=1000)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    body["max_tokens"] = values["tokens"]
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
    stack.manage("migrate", "--verbosity", "0")
    batch = stack.shell(ROWS, url=stack.emulator(), lines=LINES, tokens=60, sequences=16)
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
    rows, lines, prompt_tokens, output_tokens = stack.one(
        "SELECT count(*), count(DISTINCT request_id), sum(prompt_tokens), sum(output_tokens) "
        "FROM gateway_ledgerrow WHERE NOT lost"
    )
    assert rows == lines == LINES, "each is paid once"
    assert ended["usage"]["input_tokens"] == prompt_tokens
    assert ended["usage"]["output_tokens"] == output_tokens == LINES * 60
    assert {checks_of(each)["tasks"] for each in (other_port, *(() if killed else (port,)))} == {"ok"}
    (epoch,) = stack.one(f"SELECT epoch FROM batches_batch WHERE id = {batch}")
    assert epoch >= 2


def test_ten_thousand_lines_survive_a_relay_that_was_frozen_while_it_answered_them(stack):
    """The work is a role of its own: the process that has it freezes for longer than its right, and comes back."""
    stack.manage("migrate", "--verbosity", "0")
    batch = stack.shell(ROWS, url=stack.emulator(), lines=MANY, tokens=FEW_TOKENS, sequences=64)
    ports = [stack.web(part) for part in ("dispatcher", "relay", "relay")]

    def done() -> int:
        return stack.one(f"SELECT completed + failed FROM batches_batch WHERE id = {batch}")[0]

    def owner() -> tuple[int, int]:
        token, epoch = stack.one("SELECT token, epoch FROM fleet_owner WHERE role = 'batches'")
        return int(token.split()[2]) if token else 0, epoch

    until(lambda: done() >= MANY / 10, WITHIN_S)
    first, epoch = owner()
    frozen = next(process for process, _ in ports if process.pid == first)
    frozen.send_signal(signal.SIGSTOP)
    frozen_s, at = time.monotonic(), done()
    until(lambda: owner()[1] > epoch, WITHIN_S)
    print(f"frozen at {at}, taken over after {time.monotonic() - frozen_s:.1f} s")
    until(lambda: done() > at + 100, WITHIN_S)
    time.sleep(max(0.0, frozen_s + 10.0 - time.monotonic()))
    assert done() < MANY, "it comes back before the end"
    print(f"back at {done()}")
    frozen.send_signal(signal.SIGCONT)
    until(lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}")[0] == "finalizing", 4 * WITHIN_S)
    time.sleep(5.0)  # rows of lost executions
    ended = stack.shell(FILES, batch=batch)
    answers = [json.loads(line) for line in ended["output"].splitlines()]
    assert ended["status"] == "completed"
    assert sorted(int(one["custom_id"]) for one in answers) == list(range(MANY))
    rows, lines, output_tokens = stack.one(
        "SELECT count(*), count(DISTINCT request_id), sum(output_tokens) FROM gateway_ledgerrow WHERE NOT lost"
    )
    assert rows == lines == MANY, "each is paid once"
    assert ended["usage"]["output_tokens"] == output_tokens == MANY * FEW_TOKENS
    assert {checks_of(port)["tasks"] for _, port in ports} == {"ok"}
    assert "Traceback" not in stack.said()
