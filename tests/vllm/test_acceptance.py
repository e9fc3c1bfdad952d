"""What the gateway is held to is what vLLM's protocol models take."""

import json
import subprocess

import pytest

from tests.vllm import acceptance


@pytest.mark.vllm
@pytest.mark.gate
def test_recorded_requests_are_accepted_by_vllm(vllm_python: str) -> None:
    cases = acceptance.cases()
    done = subprocess.run(
        [vllm_python, acceptance.__file__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    taken = json.loads(done.stdout.splitlines()[-1])
    recorded = json.loads(acceptance.RECORDED.read_text())
    now = [[kind, body, verdict] for (kind, body), verdict in zip(cases, taken, strict=True)]
    if now != recorded:
        acceptance.RECORDED.write_text("[\n" + ",\n".join(map(json.dumps, now)) + "\n]\n")
    assert now == recorded, f"{acceptance.RECORDED.name} is written again: look at what differs, and commit it"
