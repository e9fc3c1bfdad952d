"""Run one benchmark, or all. With --json, print exactly one JSON object to stdout."""

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import tests.bench


def names() -> list[str]:
    """Return the available benchmarks: the modules of this package except this one and tests."""
    modules = (module.name for module in pkgutil.iter_modules(tests.bench.__path__))
    return sorted(name for name in modules if not name.startswith(("_", "test_", "conftest")))


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run the benchmark *name* with its own command-line *arguments*."""
    module = importlib.import_module(f"tests.bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench {name}", description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    module.add_arguments(parser)
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):
        return module.run(options)


def rows(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and printed values of a result, in its order."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from rows(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", f"{value:,.4g}" if isinstance(value, float) else str(value)


def show(name: str, result: dict[str, Any], wall_s: float) -> None:
    table = list(rows(result))
    width = max((len(key) for key, _ in table), default=0)
    print(f"{name}  ({wall_s:.1f} s)")
    for key, value in table:
        print(f"  {key:<{width}}  {value:>14}")
    print(flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        epilog="Options of a benchmark: python -m tests.bench NAME -- --help",
    )
    parser.add_argument("name", nargs="?", choices=names(), help="which one; all of them if left out")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")
    chosen, arguments = parser.parse_known_args()
    arguments = [argument for argument in arguments if argument != "--"]
    if arguments and chosen.name is None:
        parser.error(f"options of a benchmark need its name: {' '.join(arguments)}")

    if chosen.name and chosen.json:
        print(json.dumps(measure(chosen.name, arguments)))
        return 0
    if not chosen.json:
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n", flush=True)
    results, failed = {}, []
    for name in [chosen.name] if chosen.name else names():
        started_s = time.perf_counter()
        try:
            results[name] = measure(name, arguments)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        if not chosen.json:
            show(name, results[name], time.perf_counter() - started_s)
    if chosen.json:
        print(json.dumps(results))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
