"""`python -m workers.emulator`: serve emulated vLLM instances until interrupted."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable

from workers.emulator.server import Fleet, make_app, run
from workers.emulator.spec import InstanceSpec

SINGLE = "single"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and serve. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.emulator", description="Emulated vLLM servers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one; the first line of output names it")
    parser.add_argument("--single", metavar="MODEL", help="serve one instance of MODEL at the root, as vLLM does")
    parser.add_argument("--seed", type=int, default=0, help="seed of the answers' lengths")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options.host, options.port, options.single, options.seed))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed: a write costs half as much as with asyncio's loop."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(host: str, port: int, model: str | None, seed: int) -> int:
    fleet = Fleet(seed)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        runner = await run(make_app(fleet, SINGLE if model else None), host, port)
    except OSError as error:
        sys.stderr.write(f"emulator: cannot listen on {host}:{port}: {error.strerror}\n")
        return 1
    if model:
        fleet.put(SINGLE, InstanceSpec(model=model))
    sys.stdout.write(f"emulator: on http://{host}:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    # A request, its answer and its prompt refer to each other, so only the collector frees them. Out of its way with all
    # that is loaded by now, it looks at them often; otherwise not until they are a quarter of that, hundreds of MB later.
    gc.collect()
    gc.freeze()
    gc.collect()
    await stop.wait()
    await runner.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
