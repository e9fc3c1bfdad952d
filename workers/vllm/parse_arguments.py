"""Run by vLLM's own Python: parse a server's command line as vLLM would, and say as JSON what is wrong with it.

    VLLM_PYTHON parse_arguments.py '{"own": ["--max-num-seqs", "8"], "extra": ["--enforce-eager"]}'

Prints {"error": ""} for a good line. "extra" must not change what "own" sets: vLLM takes flags in several spellings, so
the parsed values are compared. Exit status 3: this environment has no parser that we know.
"""

import argparse
import json
import os
import sys
from typing import Any


class Refused(Exception):
    pass


def make_parser() -> tuple[Any, Any]:
    """Return the parser of `vllm serve`. Modules have moved between releases."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise Refused(message)

    return make_arg_parser(Parser(prog="vllm serve")), validate_parsed_serve_args


def problem(own: list[str], extra: list[str]) -> str:
    parser, validate = make_parser()
    try:
        alone = vars(parser.parse_args(own))
        both = parser.parse_args([*own, *extra])
        validate(both)
    except Refused as error:
        return str(error)
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        return str(error)
    except SystemExit:  # --help, --version
        return "this asks for help or a version, not for a server"
    usual = vars(parser.parse_args([]))
    for name, value in alone.items():
        if value != usual.get(name) and vars(both)[name] != value:
            return f"argument --{name.replace('_', '-')}: Pilothouse sets it from its own rows"
    return ""


if __name__ == "__main__":
    lines = json.loads(sys.argv[1])
    answer = os.dup(1)  # vLLM's imports may write to standard output
    os.dup2(2, 1)
    try:
        error = problem(lines["own"], lines["extra"])
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(3)
    os.write(answer, json.dumps({"error": error}).encode())
    os._exit(0)  # without waiting for what the imports have started
