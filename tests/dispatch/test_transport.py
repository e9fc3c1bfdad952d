"""Relays and dispatchers agree on what is open, whatever is lost between them, and only those of one installation talk."""

import asyncio
import random
from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from controlplane.dispatch import port, relays, transport
from controlplane.dispatch.lease import State
from controlplane.dispatch.registrations import Registrations
from controlplane.dispatch.relays import Relays
from controlplane.dispatch.transport import Socket
from controlplane.fleet.shards import in_zone
from controlplane.gateway import dispatchers
from controlplane.gateway.dispatchers import Dispatchers
from tests.dispatch.test_port import RECORDS

ASKED = RECORDS[0]


class Network:
    """Sockets of one test; it loses messages while *loses* says so."""

    def __init__(self, seed):
        self.random, self.loses = random.Random(seed), 0.0
        self.bound, self.connected, self.identities, self.kept = {}, {}, count(), []
        self.refused = set()  # addresses
        self.keeps = False
        """Messages for dispatchers, as ZeroMQ does while there is none."""

    def socket(self, loop, kind, receive):
        network, identity = self, b"%d" % next(self.identities)

        class Fake:
            def bind(self, address):
                network.bound[address] = receive
                return address

            def connect(self, address):
                if address in network.refused:
                    raise zmq.ZMQError(zmq.EINVAL)
                self.address = address
                network.connected[identity] = receive

            def send(self, *parts):
                if network.random.random() < network.loses:
                    return
                if kind == zmq.ROUTER:
                    target, message = network.connected.get(parts[0]), [parts[1]]
                else:
                    target, message = network.bound.get(self.address), [identity, parts[0]]
                if network.keeps and kind == zmq.DEALER:
                    network.kept.append((target, message))
                elif target is not None:
                    loop.call_soon(target, message)

            def close(self):
                network.connected.pop(identity, None)

        return Fake()


class Lease:
    """The roles as a relay reads them."""

    owner, held, owned = "relay", False, {}

    def __init__(self, installation):
        self.installation = installation

    @property
    def roles(self):
        return self.installation.roles

    @property
    def shards(self):
        return [*self.roles] or [port.FIRST]


SHARDS = {"m": port.FIRST, "n": "shard 2"}


class Installation:
    """Three dispatchers, which own two shards of models in each of *zones*, and two relays."""

    def __init__(self, network, clock, zones=("",)):
        self.network, self.clock, self.zones = network, clock, zones
        self.books = [{} for _ in range(3)]
        self.owners = {in_zone(shard, zone): None for shard in SHARDS.values() for zone in zones}
        self.epochs = dict.fromkeys(self.owners, 0)
        self.arrived, self.forwarded, self.wrong = {}, 0, []
        self.dispatchers = []
        for at, book in enumerate(self.books):
            self.dispatchers.append(
                Relays(
                    clock,
                    number=100 + at,
                    local=lambda record: None,
                    take=lambda record, at=at: self.take(at, record),
                    left=lambda relay, book=book: self.left(book, relay),
                    owns=lambda at=at: {role: self.epochs[role] for role, owner in self.owners.items() if owner == at},
                )
            )
            self.dispatchers[at].listen(f"tcp://{at}")
            models = [replace(served(name).models[0], shard=shard) for name, shard in SHARDS.items()]
            self.dispatchers[at].deliver(port.ServedModels(tuple(models)))
        self.open = [{}, {}]
        self.placed = []
        self.relays = [
            Dispatchers(
                Lease(self),
                None,
                serving=dict,
                number=relay + 1,
                receive=lambda record, relay=relay: self.receive(relay, record),
                opened=lambda requests=requests: [port.Open(one) for one in requests.values()],
                entered=list,
                clock=clock,
                zone=zones[relay % len(zones)],
                near=lambda zone, regions: sorted(zones, key=lambda other: other != zone),
            )
            for relay, requests in enumerate(self.open)
        ]
        self.roles = {}
        self.numbers = 0

    @staticmethod
    def role(asked):
        return in_zone(SHARDS[asked.model], asked.zone)

    def take(self, at, record):
        match record:
            case port.Asked() | port.Open():
                asked = record.asked if isinstance(record, port.Open) else record
                if record.number in self.books[at] or asked.arrived_s != self.arrived[record.number]:
                    self.wrong.append((at, record))
                if self.owners[self.role(asked)] == at:  # else it is in a zone that this one has left
                    self.books[at][record.number] = asked
            case port.Finished() | port.Left():
                self.books[at].pop(record.number, None)

    @staticmethod
    def left(book, relay):
        for number in [number for number in book if port.relay_of(number) == relay]:
            del book[number]

    def receive(self, relay, record):
        match record:
            case port.Placed():
                self.placed.append(record)
            case port.Forward() if (asked := self.open[relay].get(record.number)) is not None:
                if record.zone in (asked.zones or ("",)):  # it was there before
                    self.wrong.append((relay, record))
                self.forwarded += 1
                asked = replace(asked, zones=(*(asked.zones or ("",)), record.zone))
                self.open[relay][record.number] = asked
                self.relays[relay].send(port.Open(asked))

    def elect(self, at, role=port.FIRST):
        before, self.owners[role] = self.owners[role], None
        if before is not None:
            self.dispatchers[before].announce()
            for number in [number for number, one in self.books[before].items() if self.role(one) == role]:
                del self.books[before][number]
        self.owners[role], self.epochs[role] = at, self.epochs[role] + 1
        if at is not None:
            self.dispatchers[at].announce()
        self.roles = self.roles | {role: State(f"d{at}", self.epochs[role], "" if at is None else f"tcp://{at}")}

    def ask(self, relay, model="m"):
        self.numbers += 1
        number, zones = ((relay + 1) << port.RELAY_BITS) + self.numbers, self.relays[relay].zones_for(model)
        self.arrived[number] = self.clock.now_s
        asked = replace(ASKED, number=number, model=model, arrived_s=self.clock.now_s, zones=zones)
        self.open[relay][asked.number] = asked
        self.relays[relay].send(asked)

    def forward(self, draw):
        """Have an owner forward a request to a zone that it has not come to."""
        at = draw.randrange(3)
        for number, asked in self.books[at].items():
            if others := [zone for zone in self.zones if zone not in (asked.zones or ("",))]:
                del self.books[at][number]
                self.dispatchers[at].deliver(port.Forward(number, draw.choice(others)))
                return

    def finish(self, relay):
        if self.open[relay]:
            number = next(iter(self.open[relay]))
            del self.open[relay][number]
            self.relays[relay].send(port.Finished(number))

    async def pass_time(self):
        self.clock.now_s += transport.TICK_S
        for each in self.relays:
            each.follow()
        for at, each in enumerate(self.dispatchers):
            each.tick()
            each.deliver(port.Room({role: dict.fromkeys(SHARDS, 9) for role, by in self.owners.items() if by == at}))
        for _ in range(5):
            await asyncio.sleep(0)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize("zones", [("",), ("", "eu"), ("eu", "us", "")])
@pytest.mark.parametrize("seed", range(8))
async def test_after_any_loss_both_sides_have_the_same_requests(monkeypatch, seed, zones):
    """Each is with the one owner of its model in its zone, with the time of its arrival, and came to no zone twice."""
    network, clock, draw = Network(seed), Clock(), random.Random(seed)
    for module in (relays, dispatchers):
        monkeypatch.setattr(module, "Socket", network.socket)
    monkeypatch.setattr(dispatchers, "GONE_S", 1.0)
    fleet = Installation(network, clock, zones)

    def check():
        everything = {number: asked for requests in fleet.open for number, asked in requests.items()}
        assert everything
        there = [(at, asked.number, asked.zones) for at, book in enumerate(fleet.books) for asked in book.values()]
        wanted = [(fleet.owners[fleet.role(asked)], asked.number, asked.zones) for asked in everything.values()]
        assert (set(there) ^ set(wanted), len(there), fleet.wrong) == (set(), len(wanted), [])

    for role in fleet.owners:
        fleet.elect(0, role)
    for _ in range(160):
        relay, role = draw.randrange(2), draw.choice([*fleet.owners])
        match draw.randrange(9):
            case 0 | 1 | 2:
                fleet.ask(relay, draw.choice([*SHARDS]))
            case 3 | 4:
                fleet.finish(relay)
            case 5:
                fleet.elect(draw.choice([at for at in (None, 0, 1, 2) if at != fleet.owners[role]]), role)
                await fleet.pass_time()  # what was sent to one that takes it back has come
            case 6:
                network.loses = draw.choice((0.0, 0.0, 0.1, 1.0))
            case 7:
                for _ in range(draw.randrange(12)):
                    await fleet.pass_time()
            case 8:
                fleet.forward(draw)
        await asyncio.sleep(0)
    network.loses = 0.0
    for role in [role for role, at in fleet.owners.items() if at is None]:
        fleet.elect(draw.randrange(3), role)
    for _ in range(60):
        await fleet.pass_time()
    check()
    assert (fleet.forwarded > 0) == (len(zones) > 1)
    for _ in range(4):  # and they go on so
        fleet.ask(0)
        fleet.finish(1)
        await fleet.pass_time()
    check()


async def test_a_placement_by_an_earlier_owner_is_refused(monkeypatch):
    network, clock = Network(0), Clock()
    for module in (relays, dispatchers):
        monkeypatch.setattr(module, "Socket", network.socket)
    fleet = Installation(network, clock)
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
    fleet.roles[port.FIRST] = State("d1", 2, "tcp://1")  # the relay hears of the next owner before the last one does
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


@pytest.fixture
async def installation(monkeypatch):
    """Without an owner."""
    network, clock = Network(0), Clock()
    for module in (relays, dispatchers):
        monkeypatch.setattr(module, "Socket", network.socket)
    return Installation(network, clock)


async def test_an_owner_that_was_away_for_long_begins_one_session_with_each_relay(installation):
    network, begun = installation.network, []
    installation.elect(0)
    network.keeps = True
    for _ in range(40):
        await installation.pass_time()
    network.keeps = False
    assert len(network.kept) > 20
    welcome = installation.dispatchers[0]._welcome
    installation.dispatchers[0]._welcome = lambda *given: begun.append(given[0]) or welcome(*given)
    for target, message in network.kept:
        target(message)
    for _ in range(3):
        await installation.pass_time()
    assert all(relay.routes for relay in installation.relays)
    assert len(set(begun)) == 2


async def test_an_owner_at_a_wrong_address_keeps_no_relay_from_another(installation, caplog):
    installation.network.refused = {"tcp://1"}
    installation.elect(1)
    await installation.pass_time()
    installation.elect(0, SHARDS["n"])
    for _ in range(3):
        await installation.pass_time()
    assert all(relay.routes.keys() == {SHARDS["n"]} for relay in installation.relays)
    assert len([line for line in caplog.messages if "tcp://1" in line]) == 2, "each relay says it once"
    installation.network.refused = set()
    for _ in range(3):
        await installation.pass_time()
    assert all(relay.routes.keys() == {*SHARDS.values()} for relay in installation.relays)


async def test_an_error_of_one_record_loses_no_other(installation):
    installation.elect(0)
    for _ in range(2):
        await installation.pass_time()
    for _ in range(3):
        installation.ask(0)
    placed = next(one for one in RECORDS if isinstance(one, port.Placed))
    taken, numbers = [], list(installation.open[0])

    def receive(record):
        if record.number == numbers[1]:
            raise KeyError(record.number)
        taken.append(record.number)

    installation.relays[0].receive = receive
    for number in numbers:
        installation.dispatchers[0].deliver(replace(placed, number=number, epoch=1))
    await installation.pass_time()
    assert taken == [numbers[0], numbers[2]]


async def test_moments_are_those_of_the_dispatchers_machine(installation, monkeypatch):
    ahead_s, taken = 5e6, []
    dispatcher, relay = installation.dispatchers[0], installation.relays[0]
    dispatcher.clock, dispatcher._machine = lambda: installation.clock() + ahead_s, "another"
    dispatcher._take = taken.append
    installation.elect(0)
    for _ in range(2):
        await installation.pass_time()
    placed = next(one for one in RECORDS if isinstance(one, port.Placed))
    for record in (ASKED, port.Open(ASKED, placed), port.Backlog("m", ((3600.0, 40),))):
        relay.send(record)
        relay.routes[port.FIRST][1](record)
    await installation.pass_time()
    asked, opened, backlog = (
        next(one for one in taken if type(one) is kind) for kind in (port.Asked, port.Open, port.Backlog)
    )
    shifts = [
        asked.arrived_s - ASKED.arrived_s,
        opened.asked.arrived_s - ASKED.arrived_s,
        opened.placed.placed_s - placed.placed_s,
        backlog.due[0][0] - 3600.0,
    ]
    assert shifts == pytest.approx([ahead_s] * 4, abs=1.0)


@pytest.mark.parametrize("decoder", [transport.of_relay, transport.of_dispatcher])
def test_a_record_of_another_release_is_left_out_of_its_frame(decoder):
    known = port.Finished(7, 40) if decoder is transport.of_relay else port.Evict(7)
    frame = msgspec.msgpack.encode(
        (3, 5, [known, ["OfALaterRelease", 7], [*msgspec.to_builtins(known), "a later field"]])
    )
    assert decoder.decode(frame) == transport.Frame(3, 5, [known, known])


@pytest.mark.parametrize("what", ["half a character \ud800", 2**70, object()])
def test_a_record_that_cannot_be_sent_keeps_no_other_back(what):
    records = [port.Evict(7), port.Evict(what), port.Evict(8)]
    assert transport.of_dispatcher.decode(transport.encoded(3, 5, records)).records == [port.Evict(7), port.Evict(8)]


async def test_a_request_that_cannot_be_passed_on_is_refused(installation):
    refused = []
    for relay in installation.relays:
        relay.receive = refused.append
    installation.elect(0)
    for _ in range(2):
        await installation.pass_time()
    installation.relays[0].send(replace(ASKED, number=7, run="half a character \ud800"))
    await installation.pass_time()
    assert [(one.number, one.status) for one in refused if isinstance(one, port.Refused)] == [(7, 400)]


class TwoShards:
    owner, shards, roles = "relay", [port.FIRST, "shard 2"], {}


def served(*names, **more):
    models = [port.ServedModel(name, 4096, 0, has_endpoint=True, by_prefix=False, **more) for name in names]
    return port.ServedModels(tuple(models))


@pytest.fixture
def sharded():
    """A relay between two owners, each of which is the list of the records that it gets."""
    world = SimpleNamespace(first=[], second=[], open=[], refused=[], now_s=1000.0)
    world.relay = Dispatchers(
        TwoShards, None, serving=dict, number=1, receive=world.refused.append, opened=lambda: world.open, entered=list,
        clock=lambda: world.now_s,
    )  # fmt: skip
    world.relay.owned("first", world.first.append, {port.FIRST: 1})
    world.relay.owned("second", world.second.append, {"shard 2": 1})
    world.first.clear()
    world.second.clear()
    return world


def test_an_adapter_that_is_deleted_moves_no_request_of_its_model(sharded):
    both = served("m"), served("a", base="m")
    sharded.relay.received("first", port.ServedModels((*both[0].models, *both[1].models)))
    sharded.relay.send(ASKED)
    sharded.open.append(port.Open(ASKED))
    sharded.relay.received("first", both[0])
    assert sharded.first == [ASKED]


def test_what_runs_when_its_model_is_retired_is_refused_where_it_is_to_be_placed_again(sharded):
    sharded.relay.received("second", served("m", shard="shard 2"))
    sharded.relay.send(ASKED)
    sharded.open.append(port.Open(ASKED, next(one for one in RECORDS if isinstance(one, port.Placed))))
    sharded.relay.received("second", served())
    sharded.now_s += 2 * dispatchers.MOVES_WITHIN_S
    sharded.relay.received("second", served())
    assert port.Refused in map(type, sharded.refused)
    again = port.Left(ASKED.number, again=True)
    sharded.relay.send(again)
    assert sharded.first == [again], "who does not know it refuses it"


def test_a_process_that_stands_by_moves_requests_only_once_the_next_owner_knows_their_model(sharded):
    standby = sharded.relay.local = object()
    sharded.relay.received("first", served("m"))
    sharded.relay.send(ASKED)
    sharded.open.append(port.Open(ASKED))
    sharded.relay.received(standby, served("m", shard="shard 2"))
    assert (sharded.first, sharded.second) == ([ASKED], [])
    sharded.relay.received("first", served())
    assert (sharded.first[1:], sharded.second) == ([port.Left(ASKED.number)], [])
    sharded.relay.received("second", served("m", shard="shard 2"))
    assert (sharded.first[2:], sharded.second) == ([], sharded.open)


@pytest.mark.parametrize(
    ("registered", "after_s"),
    [
        ({1: (1, 2), 2: (1, 2)}, 0.0),
        ({1: (1, 2)}, 2.0),  # the other has gone meanwhile
        ({1: (), 2: (1, 2)}, 0.0),  # one that has just begun knows no other
        ({1: (), 2: ()}, 2.0),
        ({}, 2.0),
    ],
)
def test_an_heir_waits_for_the_relays_of_the_last_owner_and_for_none_longer_than_its_limit(registered, after_s):
    clock = Clock()
    registrations = Registrations(clock, 2.0)
    registrations.begin([port.FIRST])
    for relay, known in registered.items():
        assert not registrations.look()
        assert not registrations.complete(port.FIRST)
        registrations.take(port.Registered(relay, port.FIRST, known))
    clock.now_s += max(0.0, after_s - 0.1)
    assert registrations.look() == (after_s == 0.0)
    clock.now_s += 0.1
    assert registrations.look() == (after_s > 0.0)
    assert registrations.complete(port.FIRST)
