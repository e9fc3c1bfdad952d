"""Soak of the whole `manage.py up` stack for minutes or hours: demo traffic, realistic clients, an operator, and
kills.

Every part is killed with SIGKILL alone and in pairs, for three quarters of the time; the last quarter is quiet. In the
middle, without kills, a bad version is rolled out and a key with open work is revoked; the web process is not killed after
that, so that places which it leaks are seen at the end.
Reported: tracebacks and error lines, requests whose ledger row differs from the client's view, places that are still taken,
gaps between forecasts and plans, memory. Details (lines by kind, examples) go to standard error, or as JSON to --detail
FILE.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from tests.bench._soak import accounting, lines, middle, mix, wrong
from tests.bench._soak.killer import OF_RAY, RELAYED, STEPS, Kill, Killer
from tests.bench._soak.owners import Owners
from tests.bench._soak.ray import MODEL as RAY_MODEL
from tests.bench._soak.ray import Ray
from tests.bench._soak.sheep import BlackSheep
from tests.bench._soak.stack import Stack
from tests.bench._soak.streams import MODEL, TENANT, Streams
from tests.bench._soak.watch import Memory, Operator
from tests.postgres import Server, server

DEMO_DAY_S = 480.0
LEAST_DAYS = 3
QUIET_SHARE = 0.25  # of the time, at the end, without kills
WARM_S = 15.0
QUIESCES_WITHIN_S = 90.0
JOBS_SETTLE_S = 60.0  # as `controlplane.jobs.monitor`
LEDGER_WRITES_WITHIN_S = 3.0
TAKEN = ("running", "waiting", "kv_ratio")
COUNTED = ("pilothouse_active_requests", "pilothouse_ledger_lost_rows_total", "pilothouse_ledger_refused_rows_total")
ROWS = (
    "SELECT request_id, model, slo_class, outcome, status_code, error_code, prompt_tokens, output_tokens "
    "FROM gateway_ledgerrow WHERE request_id LIKE 'soak-%' ORDER BY id"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--per-s", type=float, default=4.0, help="requests of the clients, beside the demo's traffic")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds between a recovery and the next kill")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--relays", type=int, default=0, help="kill these, and owners of shards, instead of instances")
    parser.add_argument("--dispatchers", type=int, default=2, help="beside relays")
    parser.add_argument("--postgres", action="store_true", help="instead of SQLite; it is restarted too")
    parser.add_argument(
        "--streams", type=int, default=0, help="slow streams open at a time, instead of the demo's traffic"
    )
    parser.add_argument("--ray", type=float, default=0.0, help="share of the streams on instances of a Ray cluster")
    parser.add_argument("--rate", type=float, default=10.0, help="new slow streams a second")
    parser.add_argument("--only", default="", help="parts to kill, with commas between; default is all")
    parser.add_argument("--no-rollout", action="store_true", help="no bad version and no revoked key in the middle")
    parser.add_argument("--black-sheep", action="store_true", help="one instance is broken in one way after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="of the console; default is a free one")
    parser.add_argument("--emulator-port", type=int, default=0)
    parser.add_argument("--detail", type=Path, help="a file for everything that was total")
    parser.add_argument("--log", type=Path, help="a file for all that the stack printed")


def run(options: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack is stopped, whichever process ends us
    with tempfile.TemporaryDirectory(prefix="pilothouse-soak-") as folder, contextlib.ExitStack() as around:
        database = around.enter_context(server("max_connections=300")) if options.postgres else None
        words = [f"--relays {options.relays} --dispatchers {options.dispatchers}"] if options.relays else []
        words += ["--no-traffic"] if options.streams else []
        stack = Stack(
            Path(folder),
            *words,
            port=options.port,
            emulator_port=options.emulator_port,
            database_url=database.url if database else "",
            gateway=options.relays + options.dispatchers if options.relays else 0,
        )
        try:
            link = stack.wait_until_up()
            ray = Ray(stack, around) if options.ray else None
            result, detail = asyncio.run(soak(stack, link, options, database, ray))
            if not stack.ended:
                stack.interrupt()
        finally:
            stack.kill()
            if options.log:
                options.log.write_text("".join(f"{_clock(at)} {line}\n" for at, line in stack.stamped))
        left = stack.processes()
    result["demo_days"] = options.minutes * 60 / DEMO_DAY_S
    result["processes_left"] = len(left)
    detail["processes_left"] = left
    if options.detail:
        options.detail.write_text(json.dumps(detail | {"result": result}, indent=1))
    else:
        json.dump(detail, sys.stderr, indent=1)
    return result


async def soak(
    stack: Stack, link: str, options: argparse.Namespace, database: Server | None, ray: Ray | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run everything against *stack* for the given time; return (result, details)."""
    streams = Streams(stack, options.streams, options.rate, options.seed)
    if options.streams:
        await streams.prepare()
    if ray is not None:
        await ray.prepare()
        streams.shares = {MODEL: 1.0 - options.ray, RAY_MODEL: options.ray}
    began_s, up_at = time.monotonic(), time.time()
    keys = await asyncio.to_thread(stack.keys, *mix.CLASSES)
    cookies = await asyncio.to_thread(stack.cookie, link)
    jar = aiohttp.CookieJar(unsafe=True)  # an address instead of a name
    jar.update_cookies(cookies, URL(stack.url))
    stop = asyncio.Event()
    clients = mix.Mix(stack.url, keys, mix.KINDS + wrong.KINDS, options.seed)
    memory, owners = Memory(), Owners()
    writes = {"X-CSRFToken": cookies["csrftoken"]}
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(cookie_jar=jar, headers=writes, timeout=timeout) as session:
        restart = (lambda: database.control("-m", "fast", "restart")) if database else None
        steps = RELAYED + (OF_RAY if ray else ()) if options.relays else STEPS
        if options.only:
            steps = tuple(step for step in steps if set(step) <= set(options.only.split(",")))
        killer = Killer(stack, session, options.pause, steps, restart, ray)
        operator = Operator(stack, session)
        until_s = began_s + options.minutes * 60
        tasks = [
            asyncio.create_task(clients.run(options.per_s, stop)),
            asyncio.create_task(operator.run(stop, every_s=0.5)),
            asyncio.create_task(memory.run(stack, stop)),
            asyncio.create_task(owners.run(stack, stop)),
        ]
        if options.streams:
            tasks.append(asyncio.create_task(streams.run(keys[TENANT], stop)))
        await asyncio.sleep(WARM_S)
        sheep = BlackSheep(stack, session)
        if options.black_sheep:
            tasks.append(asyncio.create_task(sheep.run(stop)))
        if not options.no_kills:
            tasks.append(asyncio.create_task(killer.run(until_s - options.minutes * 60 * QUIET_SHARE, stop)))
        happened: dict[str, Any] = {}
        half_s = options.minutes * 30
        if not options.no_rollout:
            tasks.append(asyncio.create_task(go_wrong(stack, session, clients, killer, happened, half_s)))
        while (time.monotonic() < until_s or not (options.no_rollout or "revoked_key" in happened)) and not stack.ended:
            await asyncio.sleep(1.0)
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
        ended_at = time.time()
        stack_ended = stack.ended
        stop.set()
        silence = asyncio.create_task(silent_traffic(stack))  # what is held gets a place
        await asyncio.gather(*tasks)
        left_taken = None if stack_ended else await quiesce(stack, session)
        silence.cancel()
        finished = await streams.finished() if options.streams else 0
    clients.seen += streams.seen
    result, detail = judge(stack, clients, killer.kills, operator, memory, up_at, ended_at, stack_ended, left_taken)
    faults = [f"{_clock(at)} {name} {kind}" for at, name, kind in sheep.faults]
    result |= judge_owners(owners, killer.kills, ended_at)
    if ray is not None:
        result |= {"ray_lost_with_head": ray.lost}
    if options.streams:
        result |= {"streams_open_most": streams.most, "streams_open_left": len(streams.open)}
        result |= judge_finished(stack, streams, finished)
        silences = defaultdict(list)
        for kill in killer.kills:
            silences[kill.part].append(streams.silence_s(kill.at))
        result |= {"streams_asked_again": streams.asked_again, "silence_s": dict(silences)}
    return result | {"faults": len(faults)} | happened, detail | {"faults": faults}


def judge_owners(owners: Owners, kills: list[Kill], ended_at: float) -> dict[str, Any]:
    """Return how many owners there were, what would be two at a time, and seconds from each loss to the next owner."""
    taken = defaultdict(list)
    for kill in kills:
        if kill.part in ("owner", "frozen owner"):
            after_s = owners.takeover_s(kill.at, min(ended_at, kill.at + 20.0))
            taken[kill.part].append(None if after_s is None else round(after_s, 2))
    return {"owners": len(owners.changes), "owners_two": owners.faults(), "takeover_s": dict(taken)}


def judge_finished(stack: Stack, streams: Streams, finished: int) -> dict[str, Any]:
    """Return how many requests instances *finished* beside those that clients got whole, and the difference of tokens
    between rows and clients, of what ended well. Without a killed relay any of the first was given twice; with one it may
    have been at its last token.
    """
    query = "SELECT request_id, prompt_tokens, output_tokens FROM gateway_ledgerrow WHERE model LIKE ?"
    rows = {row["request_id"]: row for row in stack.rows(query, f"{MODEL}%")}
    done = [one for one in streams.seen if one.end == "done"]
    of_emulator = sum(one.model == MODEL for one in done)
    off = {
        name: sum(rows[one.request_id][name] for one in done if one.request_id in rows)
        - sum(getattr(one, name) for one in done)
        for name in ("prompt_tokens", "output_tokens")
    }
    return {"streams_done": len(done), "finished_beyond_done": finished - of_emulator, "tokens_off_by": off}


async def go_wrong(
    stack: Stack,
    session: aiohttp.ClientSession,
    clients: mix.Mix,
    killer: Killer,
    happened: dict[str, Any],
    after_s: float,
) -> None:
    """Roll out a bad version and revoke a key with open work, *after_s* from now; nothing is killed meanwhile."""
    await asyncio.sleep(after_s)
    async with killer.calm:
        killer.spares = "relay" if killer.steps is RELAYED else "web"
        happened["rollout"] = await middle.bad_rollout(stack, session)
        happened["revoked_key"] = await middle.revoked_key(stack, session, clients)


async def silent_traffic(stack: Stack) -> None:
    """Kill the demo's traffic: its streams end with it (a stopped one would not read them). The next is stopped early."""
    how = signal.SIGKILL
    while True:
        for pid in await asyncio.to_thread(stack.pids, "traffic"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        how = signal.SIGSTOP
        await asyncio.sleep(0.5)


async def quiesce(stack: Stack, session: aiohttp.ClientSession) -> dict[str, float] | None:
    """Return what the gateway still counts after all traffic: requests and reserved tokens (share of the KV cache) by
    endpoint, held ones, answers under way, rows that it lost; None if it is unreachable.
    """
    left: dict[str, float] | None = None
    deadline_s = time.monotonic() + QUIESCES_WITHIN_S
    while time.monotonic() < deadline_s and left != {}:
        await asyncio.sleep(0.5)
        try:
            async with session.get(f"{stack.url}/api/summary") as response:
                summary = await response.json()
            metrics = Counter[str]()
            for address in stack.addresses:
                async with session.get(f"{address}/metrics") as response:
                    pairs = (line.rsplit(" ", 1) for line in (await response.text()).splitlines())
                    metrics.update({name: float(value) for name, value in pairs if name in COUNTED})
            places = summary["endpoints"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            continue
        names = map("{} in {}".format, places["model"], places["region"])
        left = {"held": summary["fleet"]["held"]}
        left |= {name: metrics[name] for name in COUNTED}
        left["rows in journals"] = len(list(stack.folder.glob("ledger-unsaved*.jsonl")))
        for name, *counts in zip(names, *(places[column] for column in TAKEN), strict=True):
            left |= {f"{name} {column}": count or 0 for column, count in zip(TAKEN, counts, strict=True)}
        left = {name: count for name, count in left.items() if count}
    await asyncio.sleep(LEDGER_WRITES_WITHIN_S)
    return left


def judge(
    stack: Stack,
    clients: mix.Mix,
    kills: list[Kill],
    operator: Operator,
    memory: Memory,
    up_at: float,
    ended_at: float,
    stack_ended: bool,
    left_taken: dict[str, float] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = defaultdict(list)
    for row in stack.rows(ROWS):
        rows[row["request_id"]].append(row)
    total = accounting.account(clients.seen, rows, kills)
    # At the end the demo's traffic is killed for good (`quiesce`): the supervisor's message about it is no error.
    printed = lines.read(stack.stamped, [*kills, Kill("traffic", ended_at)])
    console = [(at, what) for at, what in operator.failed if not _excused(at, kills)]
    stale = Counter(
        name for at, name in operator.stale if not any(kill.covers(at, at, JOBS_SETTLE_S) for kill in kills)
    )
    growth = memory.growth_mb_per_hour()
    recovery_s = defaultdict(list)
    for kill in kills:
        recovery_s[kill.part].append(round(kill.back_at - kill.at, 1) if kill.back_at else None)
    requests, minutes = (
        stack.rows(f"SELECT {what} AS n FROM {table}")[0]["n"] or 0
        for what, table in (
            ("count(*)", "gateway_ledgerrow"),
            ("sum(requests)", "gateway_minuterow"),
        )
    )
    doubled = stack.rows(
        "SELECT count(*) AS n FROM (SELECT 1 FROM gateway_ledgerrow GROUP BY request_id, arrived_at HAVING count(*) > 1)"
        " AS twice"
    )[0]["n"]
    result = {
        "minutes": (ended_at - up_at) / 60,
        "tracebacks": printed.tracebacks,
        "error_lines": printed.errors,
        "error_lines_in_kills": printed.within.total(),
        "requests_sent": len(clients.seen),
        "requests_done": sum(one.end == "done" for one in clients.seen),
        "requests_unaccounted": len(total.unaccounted) + len(clients.open),
        "requests_cut_by_kill": total.cut_by_kill,
        "requests_cut_before_a_byte": total.cut_before_a_byte,
        "rows_lost": total.rows_lost,
        "failed_outside_kills": len(total.failed_outside_kills),
        "failed_in_kills": total.failed_in_kills,
        "turned_away": total.turned_away,
        "places_leaked": None if left_taken is None else len(left_taken),
        "ledger_rows": requests,
        "ledger_rows_doubled": doubled,
        "minute_series_off_by": abs(requests - minutes),
        "longest_without_forecast_s": longest_gap_s(stack, "planning_forecast", ended_at),
        "longest_without_plan_s": longest_gap_s(stack, "planning_scalingplan", ended_at),
        "first_forecast_after_s": first_after_s(stack, "planning_forecast", up_at),
        "jobs_stale": len(stale) if operator.jobs_known else None,
        "parts_killed": len(kills),
        "parts_not_back": sum(kill.back_at is None for kill in kills),
        "stack_ended": stack_ended,
        "console_looks": operator.looked.total(),
        "console_failed_outside_kills": len(console),
        "live_messages": operator.messages,
        "rss_growth_mb_per_hour": max(growth.values(), default=None),
        "rss_growth_by_part_mb_per_hour": growth,
        "recovery_s": {part: max((s for s in times if s), default=None) for part, times in recovery_s.items()},
    }
    detail = {
        "left_taken": left_taken,
        "error_lines": dict(printed.outside.most_common()),
        "error_lines_in_kills": dict(printed.within.most_common()),
        "traced": dict(Counter(printed.traced).most_common()),
        "unaccounted": total.examples(total.unaccounted),
        "failed_outside_kills": total.examples(total.failed_outside_kills),
        "rows_lost": total.examples(total.lost_by_kill),
        "by_kind": {kind: dict(ends) for kind, ends in sorted(total.by_kind.items())},
        "kills": [f"{_clock(kill.at)} {kill.part} {_since(kill)}" for kill in kills],
        "recovery_s": recovery_s,
        "jobs_stale": stale,
        "jobs_stale_in_kills": Counter(name for _, name in operator.stale) - stale,
        "console_failed": Counter(what for _, what in console),
        "console_longest_ms": operator.longest_ms,
    }
    return result, detail


def _made_at(stack: Stack, table: str) -> list[float]:
    rows = stack.rows(f"SELECT DISTINCT made_at FROM {table} ORDER BY made_at")
    return [datetime.fromisoformat(row["made_at"]).replace(tzinfo=UTC).timestamp() for row in rows]


def longest_gap_s(stack: Stack, table: str, end: float) -> float | None:
    """Return the longest time between consecutive rows of *table*, and *end*; None without rows."""
    times = [*(at for at in _made_at(stack, table) if at < end), end]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=None)


def first_after_s(stack: Stack, table: str, begin: float) -> float | None:
    """Return the time from *begin* to the first row: the first windows of demand have to end first."""
    made = _made_at(stack, table)
    return made[0] - begin if made else None


def _excused(at: float, kills: list[Kill]) -> bool:
    """Whether a page may have failed at *at*: while the web process was down."""
    return any(kill.part in ("web", "relay") and kill.covers(at - 1.0, at, 2.0) for kill in kills)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3]


def _since(kill: Kill) -> str:
    return "not back" if kill.back_at is None else f"back after {kill.back_at - kill.at:.1f} s"
