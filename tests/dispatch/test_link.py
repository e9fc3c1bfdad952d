"""Relays and dispatchers agree on what is open, whatever is lost between them, and only those of one installation talk."""

import asyncio
import random
from itertools import count

import pytest
import zmq
from msgspec.structs import replace

from controlplane.dispatch import link, port, relays
from controlplane.dispatch.lease import State
from controlplane.dispatch.link import Socket
from controlplane.dispatch.relays import Relays
from controlplane.gateway import dispatchers
from controlplane.gateway.dispatchers import Dispatchers
from tests.dispatch.test_port import RECORDS

ASKED = RECORDS[0]


class Network:
    """Sockets of one test; it loses messages while *loses* says so."""

    def __init__(self, seed):
        self.random, self.loses = random.Random(seed), 0.0
        self.bound, self.connected, self.identities = {}, {}, count()

    def socket(self, loop, kind, receive):
        network, identity = self, b"%d" % next(self.identities)

        class Fake:
            def bind(self, address):
                network.bound[address] = receive
                return address

            def connect(self, address):
                self.address = address
                network.connected[identity] = receive

            def send(self, *parts):
                if network.random.random() < network.loses:
                    return
                if kind == zmq.ROUTER:
                    target, message = network.connected.get(parts[0]), [parts[1]]
                else:
                    target, message = network.bound.get(self.address), [identity, parts[0]]
                if target is not None:
                    loop.call_soon(target, message)

            def close(self):
                network.connected.pop(identity, None)

        return Fake()


class Lease:
    """The roles as a relay reads them."""

    owner, shards, held, owned = "relay", [port.FIRST], False, {}

    def __init__(self, installation):
        self.installation = installation

    @property
    def roles(self):
        return self.installation.roles


class Installation:
    """Three dispatchers, of which one owns the queues, and two relays."""

    def __init__(self, network, clock):
        self.network, self.clock, self.epoch = network, clock, 0
        self.books = [{} for _ in range(3)]
        self.owner = 0
        self.dispatchers = []
        for at, book in enumerate(self.books):
            self.dispatchers.append(
                Relays(
                    clock,
                    number=100 + at,
                    local=lambda record: None,
                    take=lambda record, book=book: self.take(book, record),
                    left=lambda relay, book=book: self.left(book, relay),
                    owns=lambda at=at: {port.FIRST: self.epoch} if self.owner == at else {},
                )
            )
            self.dispatchers[at].listen(f"tcp://{at}")
        self.open = [{}, {}]
        self.placed = []
        self.relays = [
            Dispatchers(
                Lease(self),
                None,
                serving=dict,
                number=relay + 1,
                receive=self.receive,
                opened=lambda requests=requests: [port.Open(one) for one in requests.values()],
                entered=list,
                clock=clock,
            )
            for relay, requests in enumerate(self.open)
        ]
        self.roles = {}
        self.numbers = 0

    def take(self, book, record):
        match record:
            case port.Asked():
                assert record.number not in book
                book[record.number] = record
            case port.Open():
                assert record.number not in book
                book[record.number] = record.asked
            case port.Finished():
                book.pop(record.number, None)

    @staticmethod
    def left(book, relay):
        for number in [number for number in book if port.relay_of(number) == relay]:
            del book[number]

    def receive(self, record):
        if isinstance(record, port.Placed):
            self.placed.append(record)

    def elect(self, at):
        if self.owner >= 0:
            before, self.owner = self.owner, -1
            self.dispatchers[before].announce()
            self.books[before].clear()
        self.owner, self.epoch = at, self.epoch + 1
        self.dispatchers[at].announce()
        self.roles = {port.FIRST: State(f"d{at}", self.epoch, f"tcp://{at}")}

    def ask(self, relay):
        self.numbers += 1
        asked = replace(ASKED, number=((relay + 1) << port.RELAY_BITS) + self.numbers)
        self.open[relay][asked.number] = asked
        self.relays[relay].send(asked)

    def finish(self, relay):
        if self.open[relay]:
            number = next(iter(self.open[relay]))
            del self.open[relay][number]
            self.relays[relay].send(port.Finished(number))

    async def pass_time(self):
        self.clock.now_s += link.TICK_S
        for each in self.relays:
            each.follow()
        for each in self.dispatchers:
            each.tick()
        for _ in range(5):
            await asyncio.sleep(0)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize("seed", range(12))
async def test_after_any_loss_both_sides_have_the_same_requests(monkeypatch, seed):
    network, clock, draw = Network(seed), Clock(), random.Random(seed)
    for module in (relays, dispatchers):
        monkeypatch.setattr(module, "Socket", network.socket)
    fleet = Installation(network, clock)
    fleet.owner = -1
    fleet.elect(0)
    for _ in range(120):
        relay = draw.randrange(2)
        match draw.randrange(8):
            case 0 | 1 | 2:
                fleet.ask(relay)
            case 3 | 4:
                fleet.finish(relay)
            case 5:
                fleet.elect(draw.randrange(3))
            case 6:
                network.loses = draw.choice((0.0, 0.0, 0.1, 1.0))
            case 7:
                for _ in range(draw.randrange(12)):
                    await fleet.pass_time()
        await asyncio.sleep(0)
    network.loses = 0.0
    for _ in range(60):
        await fleet.pass_time()
    everything = {number for requests in fleet.open for number in requests}
    assert everything
    assert fleet.books[fleet.owner].keys() == everything
    assert all(not book for at, book in enumerate(fleet.books) if at != fleet.owner)
    for _ in range(4):  # and they go on so
        fleet.ask(0)
        fleet.finish(1)
        await fleet.pass_time()
    assert fleet.books[fleet.owner].keys() == {number for requests in fleet.open for number in requests}


async def test_a_placement_by_an_earlier_owner_is_refused(monkeypatch):
    network, clock = Network(0), Clock()
    for module in (relays, dispatchers):
        monkeypatch.setattr(module, "Socket", network.socket)
    fleet = Installation(network, clock)
    fleet.owner = -1
    fleet.elect(0)
    await fleet.pass_time()
    await fleet.pass_time()
    fleet.ask(0)
    (number,) = fleet.open[0]
    placed = next(one for one in RECORDS if isinstance(one, port.Placed))
    for epoch in (0, 1):
        fleet.dispatchers[0].deliver(replace(placed, number=number, epoch=epoch))
    await fleet.pass_time()
    assert [one.epoch for one in fleet.placed] == [1]
    fleet.dispatchers[0].deliver(replace(placed, number=number, epoch=1))
    fleet.roles = {port.FIRST: State("d1", 2, "tcp://1")}  # the relay hears of the next owner before the last one does
    fleet.relays[0].follow()
    await fleet.pass_time()
    assert len(fleet.placed) == 1


@pytest.mark.parametrize("key", ["that of the installation", "another"])
async def test_only_relays_of_the_installation_are_heard_over_tcp(settings, key):
    loop, heard = asyncio.get_running_loop(), []
    server = Socket(loop, zmq.ROUTER, heard.append)
    address = server.bind("tcp://127.0.0.1:*")
    if key == "another":
        settings.SECRET_KEY = "of another installation"
    client = Socket(loop, zmq.DEALER, heard.append)
    client.connect(address)
    client.send(b"hello")
    for _ in range(100):
        await asyncio.sleep(0.02)
        if heard and key != "another":
            break
    assert [parts[1] for parts in heard] == ([] if key == "another" else [b"hello"])
    client.close()
    server.close()
