"""A gateway with an emulated instance, and clients that run in environments and their own processes."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.batches.test_api import here  # noqa: F401 (a fixture)
from tests.clients import environments
from tests.gateway.conftest import ServedGateway
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)

CALLS = Path(__file__).with_name("calls")
LIMIT_S = 240.0
Run = Callable[..., Awaitable[str]]


@pytest.fixture
def run(emulated: ServedGateway, tmp_path: Path) -> Run:  # noqa: F811
    """`await run(program, *arguments, **variables)`: what it printed, with the address and a key in its environment."""

    async def of(*command: str | Path, **variables: str) -> str:
        if not os.path.exists(command[0]):  # noqa: ASYNC240 (nothing else runs yet)
            pytest.skip(f"{command[0]} is not there: `make clients` installs it")
        known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        given = {"BASE_URL": f"{emulated.url}/v1", "KEY": emulated.secret, "HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env=known | given | variables,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                printed, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            pytest.fail(f"{command[0]} took more than {LIMIT_S:g} s")
        assert process.returncode == 0, printed.decode()[-4000:] + errors.decode()[-8000:]
        return printed.decode()

    return of


@pytest.fixture
def said(run: Run) -> Callable[[str], Awaitable[dict[str, Any]]]:
    """`await said(name)`: the report of the Python script `calls/NAME_calls.py` or `calls/openai_python.py`."""

    async def of(name: str) -> dict[str, Any]:
        script = CALLS / ("openai_python.py" if name == "openai" else f"{name}_calls.py")
        report: dict[str, Any] = json.loads((await run(environments.python_of(name), script)).splitlines()[-1])
        return report

    return of
