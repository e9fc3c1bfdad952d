"""What vLLM's own parser says of a deployment's further flags, in vLLM's environment."""

from pathlib import Path

import pytest

from workers.vllm.serve import problem_with
from workers.vllm.spec import LaunchSpec

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--enforce-eager --kv-cache-dtype fp8", ""),
        ("--no-such-flag 3", "unrecognized arguments: --no-such-flag"),
        ("--block-size many", "argument --block-size"),
        ("--max_num_seqs 99", "argument --max-num-seqs: Pilothouse sets it from its own rows"),
    ],
)
def test_what_the_parser_says(flags: str, said: str, vllm_python: str, tmp_path: Path) -> None:
    spec = LaunchSpec(name="a", model="m", source="/models/m", extra_args=tuple(flags.split()))
    problem = problem_with(vllm_python, spec, tmp_path)
    assert problem is not None
    assert problem.startswith(said) if said else problem == ""
