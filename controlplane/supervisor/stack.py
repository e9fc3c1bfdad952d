"""Parts of the stack, and the order in which they start and stop."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio

import controlplane
from controlplane.background import spawn
from controlplane.dispatch.wire import SUMMARY_KEY
from controlplane.env import SQLITE_WAITS_S
from controlplane.jobs.broker import answering_workers, redis_problem
from controlplane.listening import SHARED
from controlplane.supervisor.child import kill_marked
from controlplane.supervisor.keeper import Keeper, Part, PartError
from controlplane.supervisor.redis_server import NoRedisError, OwnRedis, answers, own_redis, without_password
from controlplane.supervisor.screen import Screen
from controlplane.supervisor.state import (
    PARTS_FILE,
    REDIS_URL_FILE,
    RESTART_FILE,
    URL_FILE,
    FolderHeldError,
    hold,
    write_private,
)

PYTHON = sys.executable
INSTANCES_READY_WITHIN_S = 45.0
# Traffic first, so that the web processes have little to finish; they write their ledgers while Redis still answers.
# Celery's pool takes seconds to end even when idle, so it is asked at once and waited for in its place. The web
# process ends by itself, once its streams have had their grace and its rows are written: a write waits SQLITE_WAITS_S for
# others at most. On a machine that has nothing else to do it takes less than three seconds, and all of it less than five.
STOP_ORDER = (("traffic",), ("web", "beat", "celery"), ("emulator",), ("redis",))
WEB_GRACE_S = 2  # for open streams; the ledger is written after it
PATIENCE_S = {
    "traffic": 0.8,
    "web": WEB_GRACE_S + SQLITE_WAITS_S + 5.0,
    "beat": 3.2,
    "celery": 3.2,
    "emulator": 0.5,
    "redis": 0.3,
}
CELERY_READY_WITHIN_S = 120.0
WEB_READY_WITHIN_S = 180.0  # of a machine that has much else to do, or has to compile first; else 6
CELERY_ANSWERS_WITHIN_S = 2.0  # on a machine that has much else to do
BACKLOG = 4096
REDIS_MAX_BACK_OFF_S = 5.0  # nearly everything waits for it
# A day of the demo's traffic takes eight minutes, so it is planned by the minute, and a length model on an encoder is
# trained in minutes. What the environment says goes first.
DEMO_PACE = {
    "PILOTHOUSE_FORECAST_WINDOW_S": "60",
    "PILOTHOUSE_FORECAST_WINDOWS": "10",
    "PILOTHOUSE_FORECAST_EVERY_S": "60",
    "PILOTHOUSE_FORECAST_REFIT_S": "7200",
    "PILOTHOUSE_PLAN_EVERY_S": "60",
    "PILOTHOUSE_NIGHTLY_EVERY_S": "480",
    "PILOTHOUSE_TWIN_ERROR_EVERY_S": "300",
}
# glibc gives each thread an arena that keeps what it frees; under Python's interpreter lock two serve all threads.
ALLOCATION = {"MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of `manage.py up`. Without *relays* one process is the whole gateway."""

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    relays: int = 0
    dispatchers: int = 2
    zones: tuple[str, ...] = ()
    drain_s: float = 300.0
    emulator_port: int = 8100
    redis_url: str = ""
    demo: bool = True
    traffic: bool = True
    what_if_processes: int = 2

    @property
    def url(self) -> str:
        """Address of the console for a browser on this machine."""
        if self.host in {"0.0.0.0", "::"}:  # noqa: S104 (compared, not bound)
            return f"http://127.0.0.1:{self.port}"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def gateway(self) -> list[str]:
        """Names of the processes of the gateway, those that others need first."""
        if not self.relays:
            return ["web"]
        dispatchers = [f"dispatcher-{number}" for number in range(1, self.dispatchers + 1)]
        return [*dispatchers, *(f"relay-{number}" for number in range(1, self.relays + 1))]

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """The public address, and own ones of these processes on loopback; the last is of the relay that stands in during a
        restart."""
        names = [*self.gateway, f"relay-{self.relays + 1}"] if self.relays else []
        own = {name: ("127.0.0.1", self.port and self.port + number) for number, name in enumerate(names, 1)}
        return {"": (self.host, self.port), **own}


async def run(plan: Plan, screen: Screen) -> int:
    """Run the stack until it is asked to stop (0) or cannot continue (1)."""
    try:
        with hold(plan.state_dir, plan.url):
            kill_marked(str(plan.state_dir))  # what a supervisor that was killed left behind
            with bound(plan) as sockets:
                return await Stack(plan, screen, sockets).run()
    except (FolderHeldError, PartError) as error:
        screen.trouble(str(error))
        return 1


@contextmanager
def bound(plan: Plan) -> Iterator[dict[str, socket.socket]]:
    """Bind the sockets that the parts of the gateway listen to, by their names; that of the public port is of none.

    They are kept as long as the stack runs: what connects while a part ends is served by another, or the next. Raises
    PartError that names a port which another program has.
    """
    with ExitStack() as stack:
        if plan.demo:
            _bind("127.0.0.1", plan.emulator_port, "PILOTHOUSE_EMULATOR_PORT").close()
        yield {name: stack.enter_context(_bind(*address, "--port")) for name, address in plan.addresses.items()}


def _bind(host: str, port: int, option: str) -> socket.socket:
    """Return a socket on *port* of *host*, which does not listen yet; *option* chooses another port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            one = stack.enter_context(socket.socket(family, kind, protocol))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            stack.pop_all()
        return one
    except OSError as error:
        raise PartError(
            f"Port {port} of {host} cannot be used ({error.strerror}); choose another with {option}."
        ) from None


class Stack:
    """All parts of one machine's Pilothouse."""

    def __init__(self, plan: Plan, screen: Screen, sockets: Mapping[str, socket.socket]) -> None:
        self.plan, self.screen, self.sockets = plan, screen, sockets
        environment = ALLOCATION | (DEMO_PACE if plan.demo else {}) | dict(os.environ)
        self.keeper = Keeper(screen, environment, str(plan.state_dir), self._publish)
        self.link = ""
        self._stop_asked = asyncio.Event()
        self._up = False
        self._background: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup it is to be ignored
                loop.add_signal_handler(number, self._ask_to_stop)
        loop.add_signal_handler(signal.SIGUSR1, self._ask_to_restart)
        asked = asyncio.create_task(self._stop_asked.wait())
        up = asyncio.create_task(self._start())
        trouble = ""
        try:
            await asyncio.wait([asked, up], return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                await up  # what cannot be started at the beginning ends it; what has been started is kept
                await asked
        except (PartError, NoRedisError) as error:
            trouble = str(error)
        for task in (up, *self._background):
            task.cancel()
        await self._stop(trouble)
        asked.cancel()
        return 1 if trouble else 0

    def _publish(self, parts: list[dict[str, Any]]) -> None:
        write_private(self.plan.state_dir / PARTS_FILE, json.dumps(parts))

    def _ask_to_stop(self) -> None:
        if self._stop_asked.is_set():
            self.keeper.kill()
        self._stop_asked.set()

    def _ask_to_restart(self) -> None:
        if not self._up:
            self._restarted("Not restarted: it is still starting")
        elif self._restarting is None or self._restarting.done():
            self._restarting = spawn(self._restart(), "restart")
            self._background.append(self._restarting)

    def _restarted(self, failure: str) -> None:
        if failure:
            self.screen.trouble(failure)
        write_private(self.plan.state_dir / RESTART_FILE, failure)

    async def _restart(self) -> None:
        """Restart what runs this version's code, one after the other, with nothing refused and no stream cut.

        Another relay stands in, so that as many serve as before; a dispatcher's place is taken by the one on standby.
        """
        began, failure = time.monotonic(), ""
        self.screen.title("\nRestarting.")
        stand_in = f"relay-{self.plan.relays + 1}" if self.plan.relays else ""
        try:
            await self._prepare("database", "static")
            if stand_in:
                await self.keeper.start(self._serving(stand_in))
            for name in (*reversed(self.plan.gateway), "beat", "celery"):
                await self.keeper.restart(name)
        except PartError as error:
            failure = f"{error}; what comes after it was not restarted"
        if stand_in:
            self.keeper.end(stand_in)
        await self.keeper.drained()
        self.screen.note(f"Restarted in {time.monotonic() - began:.0f} s.\n")
        self._restarted(failure)

    async def _start(self) -> None:
        plan, screen = self.plan, self.screen
        began = time.monotonic()
        screen.title(f"Pilothouse {controlplane.__version__}, state in {plan.state_dir}")
        redis_url = await self._redis()
        self.keeper.environment["REDIS_URL"] = redis_url
        write_private(plan.state_dir / REDIS_URL_FILE, redis_url)
        write_private(plan.state_dir / URL_FILE, plan.url)

        try:
            async with asyncio.TaskGroup() as group:
                if plan.demo:
                    group.create_task(self.keeper.start(self._emulator()))
                kernels = group.create_task(self._compile("requests"))
                await self._prepare("database", "static", *(("demo", "emulated") if plan.demo else ()), "vllm", "link")
                group.create_task(self.keeper.start(self._beat()))
                await kernels  # those of the simulator come while the stack runs
                for part in (*map(self._serving, plan.gateway), self._worker(redis_url)):
                    group.create_task(self.keeper.start(part))
        except* PartError as errors:
            raise errors.exceptions[0] from None
        self._background.append(spawn(self._compile_the_rest(), "compile kernels"))
        if plan.demo:
            await self._instances(redis_url)
        if plan.traffic:
            await self.keeper.start(self._traffic())
        self._up = True
        screen.title(f"\nPilothouse is up after {time.monotonic() - began:.0f} s; Ctrl-C stops all of it.")
        screen.note(f"  Console  {plan.url}/")
        screen.note(f"  Sign in  {plan.url}{self.link} (works once, within 30 minutes)")
        screen.note(f"  API      {plan.url}/v1\n")

    async def _stop(self, trouble: str) -> None:
        began = time.monotonic()
        if trouble:
            self.screen.trouble(f"\n{trouble}")
        self.screen.note("\nStopping.")
        gateway = self.plan.gateway
        killed = await self.keeper.stop(
            [[name for one in stage for name in (gateway if one == "web" else [one])] for stage in STOP_ORDER]
        )
        for name in (REDIS_URL_FILE, URL_FILE, PARTS_FILE):
            (self.plan.state_dir / name).unlink(missing_ok=True)
        for name in {*gateway} & {*killed}:  # of the others none has anything to lose
            self.screen.trouble(
                f"{name} did not end within {PATIENCE_S['web']:g} s and was killed. Ledger rows of requests that had ended "
                f"are in {self.plan.state_dir}, and the next start writes them; requests that were still open have none."
            )
        self.screen.note(f"Stopped in {time.monotonic() - began:.1f} s.")

    async def _redis(self) -> str:
        began = time.monotonic()
        if url := self.plan.redis_url:
            version = await answers(url)
            if version is None:
                problem = await asyncio.to_thread(redis_problem, url)
                raise PartError(f"Redis does not answer at {without_password(url)} (REDIS_URL): {problem}.")
            self.screen.started("redis", f"{without_password(url)}, version {version}", time.monotonic() - began)
            return url
        own: OwnRedis = own_redis()

        async def probe() -> str | None:
            version = await answers(own.url)
            return version and f"{own.binary} {version} on 127.0.0.1:{own.port}, not shared"

        await self.keeper.start(
            Part(
                "redis",
                own.argv,
                probe,
                standard_input=own.configuration(self.plan.state_dir),
                ready_within_s=15,
                stop_within_s=PATIENCE_S["redis"],
                max_back_off_s=REDIS_MAX_BACK_OFF_S,
                quiet=True,
            )
        )
        return own.url

    async def _prepare(self, *steps: str) -> None:
        def on_line(line: str) -> None:
            try:
                report = json.loads(line)
                step, text, took_s = report["step"], report["text"], report["took_s"]
            except (ValueError, TypeError, KeyError):
                self.screen.line("prepare", line)
                return
            if step == "link":
                self.link = text
            elif text:
                self.screen.started(step, text, took_s)

        await self.keeper.run(Part("prepare", [PYTHON, "-m", "controlplane.supervisor.prepare", *steps]), on_line)

    async def _compile(self, *groups: str, background: bool = False) -> None:
        """Compile kernels, in the background of everything else or not: a line a group, none where that was done before."""
        began = time.monotonic()
        argv = [PYTHON, "-m", "controlplane.kernels", *(["--background"] if background else []), *groups]
        await self.keeper.run(
            Part("kernels", argv), lambda line: self.screen.started("kernels", line, time.monotonic() - began)
        )

    async def _compile_the_rest(self) -> None:
        try:
            await self._compile("simulation", background=True)
        except PartError as error:  # the first process that needs one compiles it
            self.screen.trouble(str(error))

    def _serving(self, name: str) -> Part:
        """Return a process of the gateway: a relay listens on the public port and on loopback, a dispatcher on loopback."""
        (part, _, number), public = name.partition("-"), self.sockets[""].fileno()
        environment, sockets = {"PILOTHOUSE_PART": "whole" if part == "web" else part}, [public]
        url, path = self.plan.url, "/healthz"
        shows = f"console and API on {url}"
        if zones := part != "web" and self.plan.zones:
            environment["PILOTHOUSE_ZONE"] = zones[(int(number) - 1) % len(zones)]
        if part != "web":
            own = self.sockets[name]
            sockets = [own.fileno()]
            url = f"http://127.0.0.1:{own.getsockname()[1]}"
            shows = f"{part}, {url}/metrics"
        if part == "dispatcher":
            environment["PILOTHOUSE_DISPATCHER_BIND"] = f"ipc://{self.plan.state_dir / name}.ipc"
        elif part == "relay":
            environment[SHARED], path = str(public), "/readyz"
            sockets.append(public)
        options = {
            "--fd": sockets[0],
            "--lifespan": "on",
            "--loop": "controlplane.listening:create_loop",
            "--http": "controlplane.listening:HttpProtocol",
            "--log-level": "warning",
            "--backlog": BACKLOG,
            "--timeout-keep-alive": 75,  # longer than clients' pools keep one, so that none meets a closing one
            "--timeout-graceful-shutdown": WEB_GRACE_S,
        }
        argv = [PYTHON, "-m", "uvicorn", "controlplane.asgi:application", "--no-access-log", "--no-server-header"]
        return Part(
            name,
            argv + [str(word) for pair in options.items() for word in pair],
            answering(f"{url}{path}", shows),
            environment=environment,
            sockets=sockets,
            ready_within_s=WEB_READY_WITHIN_S,
            stop_within_s=PATIENCE_S["web"],
            stop_signal=signal.SIGINT,
            drain_within_s=self.plan.drain_s + PATIENCE_S["web"],
            overlaps=part != "dispatcher",  # the next one has its address
        )

    def _worker(self, redis_url: str) -> Part:
        # Processes, not threads: only they can be stopped at a task's time limit, and a simulation's computing must not
        # hold up fleet operations behind one interpreter lock.
        # Long tasks at most: forecasts with plans, LONG_WORK, and runs of what-ifs. One process is left to short ones.
        processes = 3 + self.plan.what_if_processes
        argv = _celery("worker", "--queues", "control,simulation", "--concurrency", str(processes), "--pool", "prefork")
        argv += ["--hostname", "stack@%h", "--without-mingle", "--without-gossip"]

        async def probe() -> str | None:
            answered = await asyncio.to_thread(answering_workers, redis_url, CELERY_ANSWERS_WITHIN_S)
            return f"worker with {processes} processes on queues control and simulation" if answered else None

        return Part(
            "celery",
            argv,
            probe,
            ready_within_s=CELERY_READY_WITHIN_S,
            stop_within_s=PATIENCE_S["celery"],
            stop_early=True,
        )

    def _beat(self) -> Part:
        schedule = str(self.plan.state_dir / "celerybeat-schedule")
        argv = _celery("beat", "--schedule", schedule, "--pidfile", "")
        return Part("beat", argv, shows="periodic tasks", stop_within_s=PATIENCE_S["beat"])

    def _emulator(self) -> Part:
        url = f"http://127.0.0.1:{self.plan.emulator_port}"
        argv = [PYTHON, "-m", "workers.emulator", "--port", str(self.plan.emulator_port)]

        async def revive() -> None:
            await self._prepare("emulated")

        probe = answering(f"{url}/emulator/instances", f"emulated vLLM servers on {url}")
        return Part("emulator", argv, probe, stop_within_s=PATIENCE_S["emulator"], on_restart=revive)

    def _traffic(self) -> Part:
        argv = [PYTHON, "-m", "workers.traffic", "--url", f"{self.plan.url}/v1"]
        return Part("traffic", argv, shows="waves from three regions", stop_within_s=PATIENCE_S["traffic"])

    async def _instances(self, redis_url: str) -> None:
        """Wait until the published summary has every instance ready, at most INSTANCES_READY_WITHIN_S seconds."""
        began = time.monotonic()
        ready = total = 0
        async with redis.asyncio.from_url(redis_url) as client:
            while time.monotonic() - began < INSTANCES_READY_WITHIN_S:
                with suppress(redis.RedisError, ValueError, KeyError):
                    fleet = json.loads(await client.get(SUMMARY_KEY) or "{}")["fleet"]
                    ready, total = fleet["instances_ready"], fleet["instances"]
                    if 0 < total == ready:
                        break
                await asyncio.sleep(0.2)
        self.screen.started("instances", f"{ready} of {total} ready", time.monotonic() - began)


def _celery(*options: str) -> list[str]:
    quiet = ["-W", "ignore:You're running the worker"]
    return [PYTHON, *quiet, "-m", "celery", "-q", "-A", "workers.celery", *options, "--loglevel", "WARNING"]


def answering(url: str, shows: str) -> Callable[[], Awaitable[str | None]]:
    """Return a probe that returns *shows* once a GET of *url* is answered with 200."""

    async def probe() -> str | None:
        timeout = aiohttp.ClientTimeout(total=2)
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                return shows if response.status == 200 else None
        return None

    return probe
