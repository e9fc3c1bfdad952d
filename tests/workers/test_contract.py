"""The contract of `tests/vllm`, which the emulated server keeps in every run; `make vllm-tests` asks vLLM the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import Server, adapter, emulated, http  # noqa: F401
from tests.vllm.test_contract import *  # noqa: F403
from tests.vllm.test_contract_control import *  # noqa: F403


@pytest.fixture(scope="session")
def server(adapter: Path) -> Iterator[Server]:  # noqa: F811
    process, url = emulated(enable_auto_tool_choice=True)
    with process:
        yield Server("emulator", url, str(adapter))
        process.terminate()
