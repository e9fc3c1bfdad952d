"""Launcher of vLLM servers on the machines of a Ray cluster, and what Ray says of its machines.

A node is a machine, or several that have the same custom resource `group:NAME`. An instance has a placement group of its
name: all of its GPUs on one machine where they fit (tensor parallel), else the same number on each of several (tensor
parallel within a machine, pipeline parallel over them). In each bundle a detached actor `NAME.RANK` keeps one vLLM process;
Ray knows both by name, so that a later call from any process finds the server again.
"""

import asyncio
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.ray.server import BY_VALUE, Server
from workers.vllm.engine_log import root_error
from workers.vllm.launcher import Launched, LaunchError
from workers.vllm.serve import HOST_IP, flags, variables
from workers.vllm.spec import LaunchSpec

NAMESPACE = "pilothouse"
CONNECT_S = 1.0
ANSWER_S = 10.0
STATES_S = 2.0
POLL_S = 0.05
ACTOR_S = 60.0  # a first actor waits for a Python process on its machine
GROUP_S = 10.0
STOP_S = 30.0  # beyond its grace: engine, workers and their shared memory (`processes.end`)
HEAD_PORT = 6379
NODE_ID = "ray.io/node-id"
_lock, _lost = threading.Lock(), threading.Event()


class State(NamedTuple):
    """A server's address and process, where its actors say so, and how it *ended*: "" if it runs."""

    launched: Launched | None
    ended: str


UNKNOWN = State(None, "not known to Ray")
LOST = State(None, "lost with a machine or an actor")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster, as Ray describes it; GPUs are units of *resource*."""

    id: str
    node: str
    address: str
    alive: bool
    region: str
    gpu_type: str
    resource: str = "GPU"
    gpus: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)
    """GPUs that placement groups have there, by their names."""

    @property
    def free(self) -> int:
        return self.gpus - sum(self.groups.values())


def unreachable(address: str) -> str:
    """Return in one sentence why the head at *address* cannot be asked, in a second; "" if it listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return f"RAY_ADDRESS is {address!r}, and not HOST:PORT of Ray's head, such as 10.0.0.1:{HEAD_PORT}"
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return f"Ray's head at {address} does not answer ({error.strerror or error})"
    return ""


def connect(address: str) -> Any:
    """Return the module `ray`, connected to the cluster whose head is at *address*. Raises LaunchError.

    The connection stays, since each one is a job in Ray's tables, until the head was away. Ray ends a process whose head is
    away for a minute: only a Celery worker's pool process connects, which is replaced.
    """
    try:
        import ray
    except ImportError:
        raise LaunchError("Ray is not installed on this host: pip install 'pilothouse[ray]'") from None
    if problem := unreachable(address):
        _lost.set()
        raise LaunchError(problem)
    with _lock:
        if _lost.is_set():
            ray.shutdown()
            _lost.clear()
        if not ray.is_initialized():
            for module in BY_VALUE:
                ray.cloudpickle.register_pickle_by_value(module)
            try:
                with redirect_stderr(sys.__stderr__):  # Celery's has no file, which Ray asks for
                    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            except Exception as error:  # of many kinds: other versions, no raylet here, a head that has just gone
                ray.shutdown()
                raise LaunchError(f"Ray at {address} cannot be used: {_in_one_line(error)}") from error
    return ray


def machines(address: str) -> list[Machine]:
    """Return the machines of the cluster at *address* that have a region, lost ones too. Raises LaunchError."""
    ray = connect(address)
    with _answers(f"Ray at {address}"):
        taken: dict[str, dict[str, int]] = {}
        for group in _groups(ray):
            for index, node in group["bundles_to_node_id"].items() if group["state"] == "CREATED" else ():
                on = taken.setdefault(node, {})
                name = group["name"] or group["placement_group_id"]
                on[name] = on.get(name, 0) + _gpus(group["bundles"][index])[1]
        found = []
        for each in ray.nodes():
            machine = _machine(each, taken.get(each["NodeID"], {}))
            if machine.region or not machine.alive:  # Ray forgets the resources of a lost machine
                found.append(machine)
    return found


def spread(gpus: int, free: Mapping[str, int]) -> list[str]:
    """Return the fewest machines that have *gpus* among them in equal shares, the fullest first; none if they do not fit."""
    by_room = sorted(free, key=lambda machine: (free[machine], machine))
    for count in range(1, min(gpus, len(free)) + 1):
        fitting = [machine for machine in by_room if free[machine] * count >= gpus]
        if gpus % count == 0 and len(fitting) >= count:
            return fitting[:count]
    return []


class RayLauncher:
    """Launches servers in the Ray cluster whose head is at *address*."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def start(self, spec: LaunchSpec) -> Launched:
        return await asyncio.to_thread(self._start, spec)

    async def stop(self, name: str, *, grace_s: float = 10.0) -> None:
        await asyncio.to_thread(self._stop, name, grace_s)

    async def alive(self, name: str) -> bool:
        return not (await asyncio.to_thread(self.states, name)).get(name, UNKNOWN).ended

    def states(self, only: str = "") -> dict[str, State]:
        """Return the states of the servers that Ray keeps, or of *only*, by name. Raises LaunchError where Ray cannot say.

        A server whose machine is silent counts as running until Ray gives the machine up.
        """
        ray = connect(self._address)
        found = {}
        with _answers(f"Ray at {self._address}"):
            groups = {each["name"]: len(each["bundles"]) for each in _groups(ray) if only in ("", each["name"])}
            kept = _actors(ray, groups)
            asked = {name: [each.state.remote() for each in actors] for name, actors in kept.items()}
            waited = [answer for answers in asked.values() for answer in answers]
            if waited:
                ray.wait(waited, num_returns=len(waited), timeout=STATES_S)
            for name, answers in asked.items():
                found[name] = _together(ray, answers) if len(answers) == groups[name] else LOST
        return found

    def log(self, name: str, count: int) -> tuple[str, list[str], str]:
        """Return file and last *count* lines of the log of *name*, and the error that ended it ("" for none), of the first
        of its processes that has one. An empty log for a server that is not there, or whose machine is lost.
        """
        ray = connect(self._address)
        logs = []
        with _answers(name):
            for actor in _actors(ray, [name])[name]:
                try:
                    logs.append(ray.get(actor.log.remote(count), timeout=ANSWER_S))
                except ray.exceptions.RayActorError:
                    continue
        for file, lines, text in logs:
            if error := root_error(text):
                return file, lines, error
        return (logs[0][0], logs[0][1], "") if logs else ("", [], "")

    def text(self, name: str) -> str:
        """Return the end of the log of the first process of *name*; "" for none."""
        ray = connect(self._address)
        with _answers(name):
            actors = _actors(ray, [name])[name][:1]
            return str(ray.get(actors[0].log.remote(0), timeout=ANSWER_S)[2]) if actors else ""

    def _start(self, spec: LaunchSpec) -> Launched:
        if not spec.source:
            raise LaunchError(f"{spec.name}: the model {spec.model} names no folder or repository to load.")
        launched = self.states(spec.name).get(spec.name, UNKNOWN).launched
        if launched is not None:
            return launched
        self._stop(spec.name, 0.0)  # what is left of it
        ray = connect(self._address)
        there = {each.id: each for each in machines(self._address) if each.node == spec.node and each.alive}
        chosen = spread(spec.tensor_parallel, {each.id: each.free for each in there.values()})
        if not chosen:
            room = ", ".join(f"{each.address} {each.free} of {each.gpus}" for each in there.values())
            needs = f"{spec.name} needs {spec.tensor_parallel} GPUs of {spec.node or 'a node'}"
            raise LaunchError(f"{needs}, and Ray has free there: {room or 'none'}.")
        try:
            with _answers(spec.name):
                return self._start_on(ray, spec, [there[each] for each in chosen])
        except LaunchError:
            self._stop(spec.name, 0.0)
            raise

    def _start_on(self, ray: Any, spec: LaunchSpec, chosen: Sequence[Machine]) -> Launched:
        """Start a process on each of *chosen*, in the order of their ranks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = spec.tensor_parallel // len(chosen)
        group = ray.util.placement_group(
            [{machine.resource: share} for machine in chosen],
            strategy="STRICT_SPREAD" if len(chosen) > 1 else "STRICT_PACK",
            name=spec.name,
            lifetime="detached",
            bundle_label_selector=[{NODE_ID: machine.id} for machine in chosen],
        )
        if not group.wait(GROUP_S):
            raise LaunchError(f"{spec.name}: Ray has no room for its placement group on {spec.node}.")
        actors = []
        for rank, machine in enumerate(chosen):
            gpus = {"num_gpus": share} if machine.resource == "GPU" else {"resources": {machine.resource: share}}
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            name = f"{spec.name}.{rank}"
            kind = ray.remote(Server).options(
                name=name, lifetime="detached", num_cpus=0, scheduling_strategy=place, **gpus
            )
            actors.append(kind.remote(name))
        host = chosen[0].address
        port, meeting = ray.get(actors[0].free_ports.remote(host, 2), timeout=ACTOR_S)
        url = f"http://{host}:{port}"
        started = []
        for rank, (actor, machine) in enumerate(zip(actors, chosen, strict=True)):
            own = spec.model_copy(update={"host": host, "tensor_parallel": share})
            words = [*flags(own, port), *_over_machines(len(chosen), rank, host, meeting)]
            given = variables(own) | ({HOST_IP: machine.address} if len(chosen) > 1 else {})
            # Not to the constructor, whose arguments Ray would keep: they hold secrets.
            started.append(actor.start.remote(url, spec.source, words, given))
        return Launched(url, ray.get(started, timeout=ACTOR_S)[0])

    def _stop(self, name: str, grace_s: float) -> None:
        ray = connect(self._address)
        with _answers(name):
            actors, group = _actors(ray, [name])[name], None
            with suppress(ValueError):  # there is none
                group = ray.util.get_placement_group(
                    name
                )  # before its actors end: a start may make another of the name
            ended = [actor.stop.remote(grace_s) for actor in actors]
            for answer in ended:
                with suppress(ray.exceptions.RayActorError):  # lost with its machine
                    ray.get(answer, timeout=grace_s + STOP_S)
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)
            deadline = time.monotonic() + ANSWER_S
            while actors and _actors(ray, [name])[name] and time.monotonic() < deadline:  # their names are free again
                time.sleep(POLL_S)


def _actors(ray: Any, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the living actors of servers by *names*, by rank."""
    ranks = sorted(
        (each.rpartition(".")[0], int(each.rpartition(".")[2]), each) for each in ray.util.list_named_actors()
    )
    found: dict[str, list[Any]] = {name: [] for name in names}
    for name, _, each in ranks:
        if name in found:
            with suppress(ValueError):  # it has just ended
                found[name].append(ray.get_actor(each))
    return found


def _groups(ray: Any) -> list[dict[str, Any]]:
    """Return Ray's descriptions of the placement groups that there are."""
    return [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]


def _together(ray: Any, answers: Sequence[Any]) -> State:
    """Return the state of a server by the *answers* of its actors; running, for all that one knows, without an answer."""
    launched = None
    for answer in answers:
        try:
            url, process_id, runs, how = ray.get(answer, timeout=0)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            continue
        except ray.exceptions.RayActorError:
            return LOST
        if not runs:
            return State(None, how or "ended")
        launched = launched or Launched(url, process_id)
    return State(launched, "")


@contextmanager
def _answers(subject: str) -> Iterator[None]:
    """Raise what Ray raises within as a LaunchError about *subject*."""
    import ray

    try:
        yield
    except LaunchError:
        raise
    except ray.exceptions.GetTimeoutError as error:
        raise LaunchError(f"{subject}: its machine does not answer Ray in time.") from error
    except (
        ray.exceptions.RayError,
        ray.exceptions.RpcError,
        ConnectionError,
        ValueError,
        RuntimeError,
        AssertionError,  # the class of an actor that is older than the head, which has lost it
    ) as error:
        if isinstance(error, ConnectionError):
            _lost.set()
        raise LaunchError(f"{subject}: Ray answers {_in_one_line(error)}") from error


def _over_machines(count: int, rank: int, host: str, port: int) -> list[str]:
    """Return vLLM's flags of the process *rank* of *count*, which meet at *host*:*port*."""
    if count == 1:
        return []
    words = ["--pipeline-parallel-size", str(count), "--distributed-executor-backend", "mp", "--nnodes", str(count)]
    words += ["--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)]
    return [*words, "--headless"] if rank else words


def _machine(node: Mapping[str, Any], groups: Mapping[str, int]) -> Machine:
    resources, labels, address = node["Resources"], node["Labels"], str(node["NodeManagerAddress"])
    own = node["NodeName"] if node["NodeName"] not in ("", address) else node["NodeManagerHostname"] or address
    resource, gpus = _gpus(resources)
    return Machine(
        id=node["NodeID"],
        node=re.sub(r"[^A-Za-z0-9_-]+", "-", _named(resources, "group:") or own)[:63],
        address=address,
        alive=bool(node["Alive"]),
        region=_named(resources, "region:") or labels.get("ray.io/region", ""),
        gpu_type=_named(resources, "gpu:")
        or labels.get("ray.io/accelerator-type", "")
        or _named(resources, "accelerator_type:"),
        resource=resource,
        gpus=gpus,
        groups=groups,
    )


def _gpus(resources: Mapping[str, float]) -> tuple[str, int]:
    """Return the resource that is GPUs: Ray's, or of CPUs that of their type (`gpu:cpu-16gb`), and its units."""
    name = next((each for each in resources if each.startswith("gpu:")), "GPU")
    name = "GPU" if resources.get("GPU") else name
    return name, int(resources.get(name, 0))


def _named(resources: Mapping[str, float], prefix: str) -> str:
    return next((name.removeprefix(prefix) for name in sorted(resources) if name.startswith(prefix)), "")


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
