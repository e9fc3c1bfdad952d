"""The routes and fields that the gateway is compared with are those of the installed vLLM."""

import json
import subprocess

import pytest

from tests.vllm import surface


@pytest.mark.vllm
@pytest.mark.gate
def test_recorded_routes_and_fields_are_those_of_vllm(vllm_python: str) -> None:
    command = [vllm_python, surface.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    now = json.loads(done.stdout.splitlines()[-1])
    if now != json.loads(surface.RECORDED.read_text()):
        lines = (f"{json.dumps(route)}: {json.dumps(fields)}" for route, fields in now.items())
        surface.RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        raise AssertionError(f"{surface.RECORDED.name} is written again: look at what differs, and commit it")
