"""A dispatcher as relays ask it over ZeroMQ: processor time of its process for one request, from its record to its end.

Four models on 250 instances each, two relays of another process, each request reported once while it runs. `request_us` is
processor time of the dispatcher's process, `requests_per_s` what one core carries by that, `direct_us` the same requests by
direct calls, as where relay and dispatcher are one process.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import zmq

MODELS, INSTANCES = 4, 250
OPEN = 2_000
"""Requests in flight."""
FRAME = 100
"""Requests that a relay sends at once in the beginning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=40_000)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
        }
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        address = f"ipc://{folder}/dispatcher"
        process = context.Process(target=serve, args=(address, theirs), daemon=True)
        process.start()
        import django

        django.setup()
        ours.recv()  # it listens
        try:
            wall_s = asyncio.run(ask(address, options.requests, ours))
            cpu_s = ours.recv()
        finally:
            process.kill()
        settle()
        direct_us = directly(options.requests)
    request_us = cpu_s * 1e6 / options.requests
    return {
        "request_us": request_us,
        "requests_per_s": 1e6 / request_us,
        "direct_us": direct_us,
        "wall_requests_per_s": options.requests / wall_s,
    }


def settle() -> None:
    """Collect as seldom as the gateway does once it has started."""
    from controlplane.gateway.process import COLLECT_AFTER

    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def fleet(deliver: Any) -> Any:
    from controlplane.dispatch.dispatcher import Dispatcher
    from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
    from controlplane.dispatch.live_fleet.topology import Topology
    from controlplane.fleet.lifecycle.states import InstanceState
    from scheduling.dispatch import warm_up
    from scheduling.policy import EndpointPolicy

    warm_up()
    dispatcher = Dispatcher(Topology(), time.monotonic, deliver=deliver)
    models = [f"m-{number}" for number in range(MODELS)]
    policy = EndpointPolicy(routing="join_shortest_queue", ordering="priority", queue_bound=65_536)
    dispatcher.apply_inventory(
        Inventory(
            models={name: ModelSpec(name, 4096, 0) for name in models},
            endpoints=tuple(EndpointSpec(name, "east", policy) for name in models),
            instances=tuple(
                InstanceSpec(number, f"i{number}", f"http://127.0.0.1:{number}", InstanceState.READY, 0.0,
                             models[number % MODELS], "east", "", 64, 1_000_000)
                for number in range(1, MODELS * INSTANCES + 1)
            ),
        )
    )  # fmt: skip
    dispatcher.pump_all()
    return dispatcher


def serve(address: str, parent: Connection) -> None:
    """Be the dispatcher: take requests, and say at the end how much processor time they took."""
    import django

    django.setup()
    from controlplane.dispatch.relays import Relays

    directly(2 * OPEN)  # loads what is compiled
    settle()

    async def main() -> None:
        relays: Relays = Relays(
            time.monotonic, number=1, local=lambda record: None, take=lambda record: dispatcher.take(record),  # noqa: PLW0108 (it is made below)
            left=lambda relay: None, owns=lambda: {"shard 1": 1},
        )  # fmt: skip
        dispatcher = fleet(relays.deliver)
        dispatcher.placement.epochs = {"shard 1": 1}
        relays.listen(address)
        parent.send("ready")
        loop = asyncio.get_running_loop()
        pulse = asyncio.create_task(relays.run())
        await loop.run_in_executor(None, parent.recv)
        began_s = time.process_time()
        await loop.run_in_executor(None, parent.recv)
        parent.send(time.process_time() - began_s)
        pulse.cancel()

    asyncio.run(main())


def asked(number: int) -> Any:
    from controlplane.dispatch.port import Asked

    now_s = time.monotonic()
    return Asked(
        number, f"{number:032x}", f"m-{number % MODELS}", "east", 1, 0, 10.0, now_s, now_s, 300, 50.0, 64, 1, True,
        slo_class="interactive", tenant="acme", surface="chat", fingerprint=number,
    )  # fmt: skip


class Relay:
    """A relay that costs less than the dispatcher, so that this has always something to do: frames of `FRAME` requests."""

    def __init__(self, number: int, address: str, requests: int) -> None:
        from controlplane.dispatch import transport
        from controlplane.dispatch.port import Hello

        self.transport, self.number, self.requests = transport, number, requests
        self.begun = self.ended = self.frames = 0
        self.welcomed = asyncio.Event()
        self.done = asyncio.Event()
        self.socket = transport.Socket(asyncio.get_running_loop(), zmq.DEALER, self.receive)
        self.socket.connect(address)
        self.send([Hello(number, 1, "machine", 0.0)])

    def send(self, records: list[Any]) -> None:
        self.socket.send(self.transport.encoded(1, self.frames, records))
        self.frames += 1

    def start(self, count: int) -> None:
        count = min(count, self.requests - self.begun)
        if count:
            self.send([asked((self.number << 36) + self.begun + each) for each in range(count)])
            self.begun += count

    def receive(self, parts: list[bytes]) -> None:
        from controlplane.dispatch.port import Advanced, Finished, Placed, Refused, Welcome

        placed = list[int]()
        for record in self.transport.of_dispatcher.decode(parts[-1]).records:
            match record:
                case Placed():
                    placed.append(record.number)
                case Welcome():
                    self.welcomed.set()
                case Refused():
                    raise RuntimeError(record.message)
        if placed:
            self.send([Advanced(tuple((number, 1) for number in placed)), *(Finished(number, 40) for number in placed)])
            self.start(len(placed))
            self.ended += len(placed)
            if self.ended == self.requests:
                self.done.set()


async def ask(address: str, requests: int, dispatcher: Connection) -> float:
    """Have two relays keep `OPEN` requests open until *requests* have ended; return the seconds that took."""
    relays = [Relay(number, address, requests // 2) for number in (2, 3)]
    await asyncio.gather(*(relay.welcomed.wait() for relay in relays))
    dispatcher.send("begin")
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    for relay in relays:
        for _ in range(OPEN // 2 // FRAME):
            relay.start(FRAME)
    await asyncio.gather(*(relay.done.wait() for relay in relays))
    wall_s = time.monotonic() - began_s
    await asyncio.sleep(0.2)
    dispatcher.send("end")
    return wall_s


def directly(requests: int) -> float:
    """Return the microseconds of processor time of a request by direct calls."""
    from controlplane.dispatch.port import Advanced, Finished, Placed

    placed: list[int] = []

    def deliver(record: Any) -> None:
        if isinstance(record, Placed):
            placed.append(record.number)

    dispatcher = fleet(deliver)
    began_s, number = time.process_time(), 0
    while number < requests:
        for _ in range(100):
            number += 1
            dispatcher.take(asked(number))
        dispatcher.take(Advanced(tuple((each, 1) for each in placed)))  # as relays do, for all streams at once
        for each in placed:
            dispatcher.take(Finished(each, 40))
        placed.clear()
    return (time.process_time() - began_s) * 1e6 / requests
