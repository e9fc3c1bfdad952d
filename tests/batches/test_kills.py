"""Web, worker and Redis are killed in the middle of a batch: each line is answered once all the same. A whole stack."""

import io
import json
import os
import signal
import textwrap
import time
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
    code = """
        import json
        from controlplane.accounts.models import Tenant
        from controlplane.accounts.services import create_api_key
        print(json.dumps(create_api_key(Tenant.objects.get(name="globex"), "batch", "a test")[1]))
        """
    said = address.manage("shell", "--no-imports", "-c", textwrap.dedent(code))
    assert said.returncode == 0, said.stderr
    key = json.loads(said.stdout.strip().splitlines()[-1])
    with openai.OpenAI(base_url=f"http://127.0.0.1:{address.port}/v1", api_key=key, max_retries=30) as client:
        yield client


def kill(address, part):
    """End *part* at once; the supervisor starts it again."""
    parts = json.loads((Path(address.environment["PILOTHOUSE_STATE_DIR"]) / PARTS_FILE).read_text())["parts"]
    (process_id,) = [one["process_id"] for one in parts if one["name"] == part]
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
