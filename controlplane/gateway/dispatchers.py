"""The relay's end of the transport: each record goes to the owner of its shard of models, in this process or another.

Whatever happens to owners, requests are open here until they have ended. While a shard has no owner they wait; the next one
gets all of them, in their order (`OpenRequests.opened`), and streams go on meanwhile. The rows say which processes own
something (`controlplane.dispatch.lease`), and each of these which shards are its, and since which epoch: what another one
says of a request is not heard.

Where regions have zones, a request goes to the owner in that of its caller, or of this process. From there it is forwarded
to another, at most once to each: by the owner (`Core.better_zone`), or from here if that zone has no owner for `GONE_S`.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import zmq
from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.lease import Lease
from controlplane.dispatch.port import FIRST
from controlplane.dispatch.transport import SILENT_S, TICK_S, Outbox, Socket, machine, of_dispatcher
from controlplane.fleet.shards import in_zone, shard_of, zone_of

logger = logging.getLogger(__name__)
HELLO_S: Final = 0.5
"""Period of asking an owner that has not answered."""
MAX_KEPT: Final = 20_000
"""Records that are kept for the next owner."""
OF_OPEN = port.Asked | port.Open | port.Advanced | port.Finished | port.Left | port.Enter | port.LoadWanted
"""Records that say something of open requests, which are registered with the next owner anyway."""
NOT_KEPT = OF_OPEN | port.RelayFigures
BY_ROLE = port.PrefixWarmed, port.RunReport, port.Open
"""Records that may not be for the first owner, whatever shards and zones there are."""
GONE_S: Final = 5.0
"""Time without an owner after which what waits in a zone is forwarded. Takeovers take less."""
MOVES_WITHIN_S: Final = 10.0
"""Time for which requests wait for the next owner of a model that was dealt to another shard."""
NOT_ENCODED: Final = "A name in the request has half a character (a lone surrogate), or a number is too large."
NONE: Final = ""
"""Shard of such a model: nobody is its owner."""


class Session:
    """A session with the process at *address*."""

    def __init__(self, dispatchers: "Dispatchers", address: str) -> None:
        self.dispatchers, self.address = dispatchers, address
        loop, clock = asyncio.get_running_loop(), dispatchers.clock
        self.welcomed = False
        self.heard_s = self.asked_s = clock()
        self.shift_s = 0.0
        """Of the owner's clock, over ours."""
        self._expected = 0
        self._socket = Socket(loop, zmq.DEALER, self._receive)
        self._outbox = Outbox(loop, self._socket.send, clock)
        self._outbox.left_out = dispatchers.refuse
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.begin()

    def begin(self) -> None:
        """Ask for a session: what was open in the last one is void."""
        self.dispatchers.left(self)
        self.welcomed, self._expected = False, 0
        self._ask(time.time_ns())

    def _ask(self, session: int) -> None:
        self.asked_s = now_s = self.dispatchers.clock()
        self._outbox.begin(session)
        self._outbox.add(port.Hello(self.dispatchers.number, session, self.dispatchers.machine, now_s))
        self._outbox.flush()

    def tick(self) -> None:
        now_s = self.dispatchers.clock()
        if self.welcomed and now_s - self.heard_s > SILENT_S:
            logger.warning("relay: the dispatcher at %s is silent", self.address)
            self.begin()
        elif not self.welcomed and now_s - self.asked_s >= HELLO_S:
            self._ask(self._outbox.session)  # ZeroMQ may keep it for an owner that is away: it is of one session
        elif self.welcomed and now_s - self._outbox.sent_s >= TICK_S:
            self._outbox.flush(empty=True)

    def send(self, record: port.FromGateway) -> None:
        if self.shift_s:
            if isinstance(record, port.Asked):
                record = replace(record, arrived_s=record.arrived_s + self.shift_s)
            elif isinstance(record, port.Open):
                placed = record.placed
                if placed is not None:
                    placed = replace(placed, placed_s=placed.placed_s + self.shift_s)
                asked = replace(record.asked, arrived_s=record.asked.arrived_s + self.shift_s)
                record = replace(record, asked=asked, placed=placed)
            elif isinstance(record, port.Backlog):
                record = replace(record, due=tuple((due_s + self.shift_s, count) for due_s, count in record.due))
        self._outbox.add(record)

    def _receive(self, parts: list[bytes]) -> None:
        frame = of_dispatcher.decode(parts[-1])
        if frame.session != self._outbox.session:
            return
        if frame.records and isinstance(frame.records[0], port.Bye):
            if self.welcomed:
                self.begin()
            return
        if frame.number != self._expected:
            logger.warning("relay: frames of the dispatcher at %s were lost", self.address)
            self.begin()
            return
        self._expected += 1
        self.heard_s = self.dispatchers.clock()
        for record in frame.records:
            match record:
                case port.Bye():
                    self.begin()
                    return
                case port.Welcome():
                    self._welcome(record)
                case _:
                    self._take(record)

    def _take(self, record: port.FromDispatcher) -> None:
        """Act on *record*, whose error is no other request's."""
        if isinstance(record, port.Placed) and self.shift_s:
            record = replace(record, placed_s=record.placed_s - self.shift_s)
        try:
            self.dispatchers.received(self, record)
        except Exception:
            logger.exception("relay: a record of a dispatcher could not be taken: %s", type(record).__name__)

    def _welcome(self, welcome: port.Welcome) -> None:
        if not self.welcomed:
            there_s = (self.asked_s + self.heard_s) / 2
            self.shift_s = 0.0 if welcome.machine == self.dispatchers.machine else welcome.clock_s - there_s
            self.welcomed = True
        self.dispatchers.owned(self, self.send, welcome.owns, welcome.relays)

    def close(self) -> None:
        self.dispatchers.left(self)
        if self.welcomed:
            self._outbox.add(port.Bye(self._outbox.session))
            self._outbox.flush()
        self._socket.close()


class Dispatchers:
    """*local* takes records of the shards that this process is *serving* (None: it never does); *opened* lists what is open,
    *entered* what that holds of limits and budgets, and *receive* gets the owners' records. *number* is this relay's,
    which stands in *zone*; *near* lists a zone and the others, nearest first, those that have one of some regions.
    """

    def __init__(
        self,
        lease: Lease,
        local: port.Send | None,
        *,
        serving: Callable[[], dict[str, int]],
        number: int,
        receive: port.Deliver,
        opened: Callable[[], Iterable[port.Open]],
        entered: Callable[[], Iterable[port.FromGateway]],
        clock: Callable[[], float],
        zone: str = "",
        near: Callable[[str, tuple[str, ...]], Sequence[str]] = lambda zone, regions: (),
    ) -> None:
        self.lease, self.local, self.number = lease, local, number
        self.receive, self.opened, self.clock, self.serving = receive, opened, clock, serving
        self.entered, self.zone, self.near = entered, zone, near
        self.machine = machine()
        self.sessions: dict[str, Session] = {}
        self._unreachable: set[str] = set()  # addresses of owners with which none could begin
        """By address."""
        self.routes: dict[str, tuple[object, port.Send]] = {}
        """The owner of each role, and what takes its records."""
        self.epochs: defaultdict[str, int] = defaultdict(int)
        """The highest known of each role: placements of an earlier one are refused."""
        self._relays: dict[str, tuple[int, ...]] = {}
        """Numbers of the relays of the owner of each role, or of its last one."""
        self._served: dict[object, port.ServedModels] = {}
        """By who serves them."""
        self._models: dict[str, port.ServedModel] = {}
        """All that are listed."""
        self._between: dict[str, float] = {}
        """Models that one owner has left and no other has taken up yet, with the time until which that is waited for."""
        self._shards: dict[str, str] = {}
        """Shard of each model, where that is not the first."""
        self.rooms: dict[str, dict[str, int]] = {}
        """By role and model, as owners said last, less what was forwarded since."""
        self._has_zones = False
        self._lost_s: dict[str, float] = {}
        """Since when roles have no owner here, where there are zones; `_gone` for long."""
        self._gone: set[str] = set()
        self._roles: dict[int, str] = {}
        """Role of each open request, where that is not the first."""
        self._kept: deque[tuple[str, port.FromGateway]] = deque(maxlen=MAX_KEPT)
        """Records that do not belong to open requests and have no owner to go to yet, by role."""

    @property
    def reachable(self) -> bool:
        """Whether requests may wait for an owner: it is this process, or one that relays reach."""
        return self.lease.held or self.linked

    @property
    def linked(self) -> bool:
        """Whether relays reach other processes: the owner of a shard, or the last one, which another one follows."""
        return any(self.lease.roles[role].address for role in self.lease.shards if role in self.lease.roles)

    def may_send(self) -> bool:
        """Whether an instance may be given a request that was placed there.

        Not once this process was frozen until its right ran out: the next owner has given the room to others.
        """
        return all(self.lease.holds(role) for role in self.lease.owned)

    # To dispatchers

    def send(self, record: port.FromGateway) -> None:
        if not (self._shards or self._roles or self._has_zones) and not isinstance(record, BY_ROLE):
            self._send(FIRST, record)
            return
        match record:
            case port.Asked():
                role = self._assign(record)
            case port.Open():
                role = self._assign(record.asked)
            case port.Advanced():
                self._advance(record)
                return
            case port.Finished() | port.Left():
                role = self._roles.get(record.number, FIRST)
                if self._roles and not (isinstance(record, port.Left) and record.again):
                    self._roles.pop(record.number, None)
            case port.Backlog():
                role = self._role(record.model, self.zones_for(record.model))
            case port.PrefixWarmed() | port.RunReport():
                for _, send in {id(owner): (owner, send) for owner, send in self.routes.values()}.values():
                    send(record)
                return
            case _:
                role = FIRST
        self._send(role, record)

    def _send(self, role: str, record: port.FromGateway) -> None:
        if (route := self.routes.get(role)) is not None:
            route[1](record)
        elif not isinstance(record, NOT_KEPT):
            self._kept.append((role, record))

    def _advance(self, record: port.Advanced) -> None:
        of: defaultdict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        for at, each in enumerate((record.tokens, record.headers)):
            for moved in each:
                of[self._roles.get(moved[0], FIRST)][at].append(moved)
        for role, (tokens, headers) in of.items():
            self._send(role, port.Advanced(tuple(tokens), tuple(headers)))

    # From dispatchers

    def received(self, owner: object, record: port.FromDispatcher) -> None:
        """Take *record* of *owner*, unless it is of a request that another one has by now."""
        if isinstance(record, port.ServedModels):
            self._serve(owner, record)
            return
        if isinstance(record, port.Room):
            self.rooms |= {role: of for role, of in record.roles.items() if self.routes.get(role, (None,))[0] is owner}
            return
        if not isinstance(record, port.Warm | port.WarmPrefix):
            role = FIRST if isinstance(record, port.OfAllowances) else self._roles.get(record.number, FIRST)
            route = self.routes.get(role)
            if route is None or route[0] is not owner:
                return
            if isinstance(record, port.Placed) and record.epoch < self.epochs[role]:
                return
        self.receive(record)

    def _serve(self, owner: object, record: port.ServedModels) -> None:
        """List the models of all owners. Open requests of those that are of another shard by now go to its owner."""
        self._served[owner] = record
        owners = {id(owner) for owner, _ in self.routes.values()} | {id(owner)}
        self._served = {each: served for each, served in self._served.items() if id(each) in owners}
        self._list()

    def _list(self) -> None:
        listed, targets = list[port.ServedModel](), dict[str, port.WeightedTargets]()
        for owner, served in self._served.items():
            listed += [each for each in served.models if self._may_list(owner, each.shard)]
            targets |= {each.name: each for each in served.targets}
        listed.sort(key=lambda each: each.has_endpoint)  # one zone may serve what another does not
        models = {each.name: each for each in listed}
        until_s = self.clock() + MOVES_WITHIN_S
        if len(self.lease.shards) > 1:  # what one owner leaves, another may take up in a moment
            for name in self._models.keys() - models.keys():
                self._between.setdefault(name, until_s)
        self._between = {  # an adapter goes with its model
            name: end_s
            for name, end_s in self._between.items()
            if name not in models and self._models[name].base not in models and self.clock() < end_s
        }
        models |= {name: replace(self._models[name], shard=NONE) for name in self._between}
        self._models = models
        shards = {each.base or each.name: each.shard for each in models.values() if each.shard != FIRST}
        moved = {name for name in shards.keys() | self._shards.keys() if shards.get(name) != self._shards.get(name)}
        self._shards = shards
        self.receive(port.ServedModels(tuple(models.values()), tuple(targets.values())))
        for each in self.opened() if moved else ():
            model, role = each.asked.model, self._roles.get(each.number, FIRST)
            if model not in moved:
                continue
            self._send(role, port.Left(each.number))
            if model in models:
                self._send(self._assign(each.asked), each)
            elif role == NONE:
                self._roles.pop(each.number, None)  # the first owner refuses it where its instance gives it back
                message = f"No instance of {model!r} is serving or being started."
                self.receive(port.Refused(each.number, 503, "model_unavailable", message, retry_after_s=15))

    def _may_list(self, owner: object, shard: str) -> bool:
        """Whether *owner* says what is of *shard*: while this process stands by it knows all models, maybe before others."""
        owners = [other for role, (other, _) in self.routes.items() if shard_of(role) == shard]
        return owner is not self.local or not owners or owner in owners

    def _role(self, model: str, zones: tuple[str, ...]) -> str:
        return in_zone(self._shards.get(model, FIRST), zones[-1] if zones else "")

    def _assign(self, asked: port.Asked) -> str:
        """Return the role of the owner of *asked* from now on."""
        role = self._role(asked.model, asked.zones)
        self._roles.pop(asked.number, None)
        if role != FIRST:
            self._roles[asked.number] = role
        return role

    # Zones

    def zones_for(self, model: str, zone: str | None = None, regions: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return, as `Asked` has it, the zone of a new request, whose caller is in *zone*, or names no region.

        It has one of *regions*, if any.
        """
        if not self._has_zones:
            return ()
        zone = self.zone if zone is None else zone
        role = self._role(model, (zone,))
        near = self.near(zone, regions)
        if zone in near and role in self.lease.roles and role not in self._gone:
            return (zone,)
        other = self.elsewhere(model, (zone,), False, regions)
        return ("" if other is None and not regions else other or next(iter(near), ""),)

    def elsewhere(
        self, model: str, zones: tuple[str, ...], with_room: bool, regions: tuple[str, ...] = ()
    ) -> str | None:
        """Return the nearest zone that serves *model* where a request that came to *zones* was not, best one with room.

        It has one of *regions*, if any.
        """
        zones = zones or ("",)
        full = None
        for zone in self.near(zones[-1], regions):
            role = self._role(model, (zone,))
            room = self.rooms.get(role, {}).get(model) if role in self.routes and zone not in zones else None
            if room:
                self.rooms[role][model] -= 1
                return zone
            if room is not None and full is None:
                full = zone
        return None if with_room else full

    def _leave_zones(self) -> None:
        """Forward what waits in a zone whose owner has gone."""
        now_s, lost = self.clock(), {*self.lease.shards, *self._roles.values()} - self.routes.keys() - {NONE}
        self._lost_s = {role: self._lost_s.get(role, now_s) for role in lost}
        self._gone = {role for role, since_s in self._lost_s.items() if now_s - since_s > GONE_S}
        for each in self.opened() if self._gone else ():
            if each.placed is None and self._roles.get(each.number, FIRST) in self._gone:
                zone = self.elsewhere(each.asked.model, each.asked.zones, False, each.asked.regions)
                if zone is not None:
                    self.receive(port.Forward(each.number, zone))

    def owned(self, owner: object, send: port.Send, owns: dict[str, int], relays: tuple[int, ...] = ()) -> None:
        """Take in that *owner* owns these roles, by epoch, with *relays*: register what is open of those that it gained."""
        for role in [role for role, (other, _) in self.routes.items() if other is owner and role not in owns]:
            del self.routes[role]
        gained = set()
        for role, epoch in owns.items():
            other = self.routes.get(role)
            if epoch < self.epochs[role] or (other is not None and other[0] is owner and epoch == self.epochs[role]):
                continue
            self.epochs[role], self.routes[role] = epoch, (owner, send)
            gained.add(role)
        known = {role: self._relays.get(role, ()) for role in gained}
        self._relays |= dict.fromkeys(owns, relays)
        if not gained:
            return
        for opened in self.opened():
            asked = opened.asked
            if self._roles.get(asked.number, self._role(asked.model, asked.zones)) in gained:
                self._send(self._assign(asked), opened)
        for record in self.entered() if FIRST in gained else ():
            self._send(FIRST, record)
        for role in gained:
            self._send(role, port.Registered(self.number, role, known[role]))
        kept, self._kept = self._kept, deque(maxlen=MAX_KEPT)
        for role, record in kept:
            self._send(role, record)

    def refuse(self, record: port.FromGateway) -> None:
        """Refuse the request of *record*, which cannot be passed on."""
        if isinstance(record, port.Asked | port.Open):
            self.receive(port.Refused(record.number, 400, "invalid_value", NOT_ENCODED, retry_after_s=None))

    def left(self, owner: object) -> None:
        """Take in that *owner* takes no records any longer."""
        self.routes = {role: route for role, route in self.routes.items() if route[0] is not owner}

    def follow(self) -> None:
        """Have a session with each process that owns something now; where one cannot begin, it is tried again."""
        if self.local is not None:
            self.owned(self.local, self.local, self.serving())
        owners = {
            state.address
            for role, state in self.lease.roles.items()
            if role in self.lease.shards and state.address and not state.lease_s and state.name != self.lease.owner
        }
        for address in self.sessions.keys() - owners:
            self.sessions.pop(address).close()
        for session in self.sessions.values():
            session.tick()
        self._unreachable &= owners
        for address in owners - self.sessions.keys():
            try:
                self.sessions[address] = Session(self, address)
            except (zmq.ZMQError, OSError) as error:
                if address not in self._unreachable:
                    logger.warning("relay: no session with the dispatcher at %s: %s", address, error)
                self._unreachable.add(address)
        self._has_zones = any(map(zone_of, self.lease.shards))
        if self._has_zones:
            self._leave_zones()
        if self._between and self.clock() >= min(self._between.values()):
            self._list()

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
