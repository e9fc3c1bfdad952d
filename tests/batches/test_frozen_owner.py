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
    batch = stack.shell(ROWS, url=stack.emulator(), lines=LINES)
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
