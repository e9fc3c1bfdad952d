"""The stack of `manage.py up` before one real vLLM on a GPU: what the gateway adds, who should hold the queue, mixed work.

Needs a server of `tests.bench._gpu_server` at --vllm. Parts:
- overhead: streamed chats, alternately direct and through the gateway, one at a time and 32 at once;
- burst: requests at a rate several times what the server carries. vLLM holds the queue, in order of arrival or by its
  `priority` with exact lengths; or we hold it, in order of arrival or shortest first, with exact and with noisy lengths,
  and with the room of the instance by its API process, by 256 or by 128 sequences;
- mixed: interactive requests alone, then the same rate alongside a batch (/v1/batches), with and without the slowdown;
- adapters: loading LoRA adapters, and the first token of one that is on the GPU, in CPU memory or only on disk.
Each part writes its JSON to --out when it is done.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench._gpu_server import CONTEXT_TOKENS, CPU_ADAPTERS, GPU_ADAPTERS, MODEL, VOCABULARY
from tests.bench.gateway import ROOT, free_port, process, uvicorn

PARTS = ("overhead", "burst", "mixed", "adapters")
BURST_PER_S = 110.0
PROCESSES = 6
"""Of clients: more than a client's own share of a core is needed."""
SEED = """
import json, sys
import django
django.setup()
from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key
from controlplane.fleet.demo import seed
from controlplane.fleet.models import Deployment, GpuType, Instance, Model, Region
seed("none")
Deployment.objects.all().delete()
Model.objects.filter(name=sys.argv[1]).update(context_tokens=int(sys.argv[3]))
deployment = Deployment.objects.create(
    model=Model.objects.get(name=sys.argv[1]), region=Region.objects.get(name="us-east"),
    gpu_type=GpuType.objects.get(name="h100-80gb"), tensor_parallel=1, max_num_seqs=256, queue_bound=8192,
    max_instances=1, ordering_policy="fcfs",
)
Instance.objects.create(name="h100", deployment=deployment, url=sys.argv[2], state="loading")
Tenant.objects.update(max_concurrent_requests=8192)
print(json.dumps(create_api_key(Tenant.objects.get(name="acme"), "bench", "bench")[1]))
"""
CHANGE = """
import json, sys
import django
django.setup()
from controlplane.fleet.models import Deployment
from controlplane.tuning.services import change
columns, settings = json.loads(sys.argv[1]), json.loads(sys.argv[2])
if columns:
    Deployment.objects.update(**columns)
for name, value in settings.items():
    change(name, value, "bench")
"""
TAKES_EFFECT_S = 3.0
ROOM_MARGIN, SLOWDOWN = 1.25, 1.25  # the defaults
NO_LIMIT = 1000.0
"""As a margin or a slowdown."""


class Job(NamedTuple):
    """One request: *number* draws its prompt."""

    number: int
    at_s: float
    prompt: int
    output: int
    priority: int = 0


class Timed(NamedTuple):
    """Its times in seconds from when it was sent; None and the reason if it failed."""

    job: Job
    ttft_s: float | None
    e2e_s: float | None
    error: str = ""


class Door(NamedTuple):
    """Where requests are sent."""

    url: str
    key: str = ""
    kind: str = "completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", help="address of the server, without /v1; without it nothing is measured")
    parser.add_argument("--lengths", type=Path, help='{"chat": [[prompt, output], ...], "conv": ...}')
    parser.add_argument("--out", type=Path, default=Path("test-results/gpu"))
    parser.add_argument("--parts", default="overhead,burst,mixed")
    parser.add_argument("--arms", default="", help="measurements of `burst` and `mixed` to make; empty: all")
    parser.add_argument("--adapters", type=Path, help="folder of the adapters that the server can read")
    parser.add_argument("--requests", type=int, default=880, help="of a burst")
    parser.add_argument("--rate", type=float, default=8.0, help="interactive requests a second in `mixed`: about half")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each measurement in `mixed`")
    parser.add_argument("--lines", type=int, default=3000, help="of a batch in `mixed`")
    parser.add_argument("--within-s", type=float, default=1e9, help="no measurement begins after that")


# Load


def words(job: Job) -> list[int]:
    draw = random.Random(job.number)
    return [draw.randrange(10, VOCABULARY - 300) for _ in range(job.prompt)]


def body(job: Job, kind: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": words(job)}
    if kind == "chat/completions":
        prompt = {"messages": [{"role": "user", "content": " ".join(f"w{word}" for word in words(job))}]}
    wanted = {"model": MODEL, "max_tokens": job.output, "ignore_eos": True, "temperature": 0.0}
    return prompt | wanted | ({"priority": job.priority} if job.priority else {})


async def one(session: Any, door: Door, job: Job, model: str = MODEL) -> Timed:
    sent_body = body(job, door.kind) | {"model": model, "stream": True}
    headers = {"Authorization": f"Bearer {door.key}"} if door.key else {}
    sent_s, first_s, ended = time.perf_counter(), None, False
    try:
        async with session.post(f"{door.url}/v1/{door.kind}", json=sent_body, headers=headers) as answer:
            if answer.status != 200:
                return Timed(job, None, None, f"{answer.status} {(await answer.text())[:200]}")
            async for chunk in answer.content.iter_any():
                now_s = time.perf_counter()
                if first_s is None and b"data:" in chunk:  # not a comment that keeps a held stream alive
                    first_s = now_s
                ended = ended or b"[DONE]" in chunk
    except Exception as error:
        return Timed(job, None, None, repr(error)[:200])
    if not ended or first_s is None:
        return Timed(job, None, None, "no end")
    return Timed(job, first_s - sent_s, now_s - sent_s)


def in_process(run: Callable[[Any], Any], channel: Any) -> None:
    async def main() -> Any:
        import aiohttp

        limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=limits[0], timeout=limits[1]) as session:
            return await run(session)

    import uvloop

    channel.put(uvloop.run(main()))


def in_processes(runs: Sequence[Callable[[Any], Any]]) -> list[Timed]:
    """Run each of *runs* with a session in a process of its own; return what all of them measured."""
    context = multiprocessing.get_context("fork")
    channel = context.Queue()
    children = [context.Process(target=in_process, args=(run, channel)) for run in runs]
    for child in children:
        child.start()
    timed = [one for _ in children for one in channel.get(timeout=600)]
    for child in children:
        child.join()
    return timed


def open_loop(door: Door, jobs: Sequence[Job]) -> tuple[list[Timed], float]:
    """Send *jobs* at their times; return what was measured and the seconds until the last one ended."""
    begin_s = time.perf_counter() + 1.0

    def part(mine: Sequence[Job]) -> Callable[[Any], Any]:
        async def run(session: Any) -> list[Timed]:
            async def at(job: Job) -> Timed:
                await asyncio.sleep(max(0.0, begin_s + job.at_s - time.perf_counter()))
                return await one(session, door, job)

            return await asyncio.gather(*map(at, mine))

        return run

    timed = in_processes([part(jobs[number::PROCESSES]) for number in range(min(PROCESSES, len(jobs)))])
    return timed, max((one.job.at_s + one.e2e_s for one in timed if one.e2e_s), default=0.0)


def closed_loop(door: Door, streams: int, seconds: float, number: int, prompt: int, output: int) -> list[Timed]:
    """Send from each of *streams* its next request when the last one has ended; return those that ended in time."""
    processes = min(4, streams)

    def part(at: int) -> Callable[[Any], Any]:
        async def run(session: Any) -> list[Timed]:
            stop_s, timed = time.perf_counter() + seconds, []

            async def stream(mine: int) -> None:
                count = 0
                while time.perf_counter() < stop_s:
                    job = Job(number + 10_000 * mine + count, 0.0, prompt, output)
                    answered = await one(session, door, job)
                    if time.perf_counter() < stop_s:
                        timed.append(answered)
                    count += 1

            await asyncio.gather(*(stream(mine) for mine in range(at, streams, processes)))
            return timed

        return run

    return in_processes([part(at) for at in range(processes)])


def poisson(lengths: Sequence[Sequence[int]], rate: float, seed: int, *, most: int = 1 << 30, seconds: float = 1e9,
            longest_prompt: int = 12_000) -> list[Job]:  # fmt: skip
    draw, jobs, at_s = random.Random(seed), [], 0.0
    while len(jobs) < most and (at_s := at_s + draw.expovariate(rate)) < seconds:
        prompt, output = draw.choice(lengths)
        jobs.append(Job(0, at_s, max(1, min(prompt, longest_prompt)), max(2, min(output, 2000))))
    return jobs


_numbers = iter(range(1_000_000, 1 << 40, 100_000))


def fresh(jobs: Sequence[Job], priority: Callable[[Job], int] = lambda job: 0) -> list[Job]:
    """Return *jobs* with prompts that the server's prefix cache has not seen."""
    first = next(_numbers)
    return [job._replace(number=first + at, priority=priority(job)) for at, job in enumerate(jobs)]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def brief(timed: Sequence[Timed], seconds: float) -> dict[str, Any]:
    good = [one for one in timed if one.e2e_s is not None and one.ttft_s is not None]
    result: dict[str, Any] = {
        "requests": len(timed),
        "failed": len(timed) - len(good),
        "seconds": round(seconds, 2),
    }
    if errors := sorted({one.error for one in timed if one.error}):
        result["errors"] = errors[:3]
    if not good:
        return result
    ttft, e2e = [one.ttft_s for one in good if one.ttft_s], [one.e2e_s for one in good if one.e2e_s]
    result |= {
        "requests_per_s": round(len(good) / seconds, 2),
        "output_tokens_per_s": round(sum(one.job.output for one in good) / seconds),
        "e2e_mean_s": round(statistics.mean(e2e), 4),
    }
    for name, values in (("ttft", ttft), ("e2e", e2e)):
        for share in (50, 95, 99):
            result[f"{name}_p{share}_ms"] = round(1000 * percentile(values, share / 100), 2)
    return result


# The stack


class Stack:
    """`manage.py up` without its demo, in a folder of its own, with the server at *vllm* as its only instance."""

    def __init__(self, folder: Path, vllm: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "PILOTHOUSE_STATE_DIR": str(folder / "state"), "PILOTHOUSE_SECRET_KEY": "bench", "PILOTHOUSE_FLOOR": "0",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings", "DATABASE_URL": "", "REDIS_URL": "",
            "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.log = folder / "up.log"
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--no-demo", "--port", str(self.port)],
            cwd=ROOT, env=os.environ | self.environment, stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._wait("the stack", lambda: "Pilothouse is up" in self.log.read_text(), 400)
            self.key = json.loads(self.code(SEED, MODEL, vllm, str(CONTEXT_TOKENS)))
            self.wait_for_instance(self.url, self.key)
        except BaseException:
            self.stop()
            raise

    def code(self, code: str, *arguments: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env=os.environ | self.environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    def change(self, settings: dict[str, Any] | None = None, **columns: Any) -> None:
        """Change the deployment's *columns* and *settings*, and wait until the gateway has read them."""
        self.code(CHANGE, json.dumps(columns), json.dumps(settings or {}))
        time.sleep(TAKES_EFFECT_S)

    def _wait(self, what: str, condition: Callable[[], Any], within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"no {what}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def wait_for_instance(self, url: str, key: str) -> None:
        def answered() -> bool:
            timed, _ = open_loop(Door(url, key), [Job(1, 0.0, 8, 2)])
            return timed[0].e2e_s is not None

        self._wait("answer through the gateway", answered, 60)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def call(url: str, key: str = "", data: Any = None, method: str = "", content_type: str = "application/json") -> bytes:
    headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {key}"} if key else {})
    if data is not None and not isinstance(data, bytes):
        data = json.dumps(data).encode()
    request = urllib.request.Request(
        url, data=data, headers=headers, method=method or ("GET" if data is None else "POST")
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


# Parts


def overhead(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    doors = {
        "direct": Door(options.vllm, "", "chat/completions"),
        "gateway": Door(stack.url, stack.key, "chat/completions"),
    }
    result: dict[str, Any] = {}
    for streams, seconds, prompt, output in ((1, 6.0, 128, 16), (32, 7.0, 128, 64)):
        times: dict[str, list[Timed]] = {name: [] for name in doors}
        spent: dict[str, float] = dict.fromkeys(doors, 0.0)
        for door in doors.values():
            closed_loop(door, streams, 1.0, next(_numbers) * 10, prompt, output)  # connections, first calls
        for name in ("direct", "gateway", "gateway", "direct"):
            times[name] += closed_loop(doors[name], streams, seconds, next(_numbers) * 10, prompt, output)
            spent[name] += seconds
        figures = {name: brief(times[name], spent[name]) for name in doors}
        added = {
            key: round(figures["gateway"][key] - figures["direct"][key], 2)
            for key in figures["direct"]
            if key.endswith("_ms") and key in figures["gateway"]
        }
        result[f"streams_{streams}"] = figures | {"added": added}
    return result


def burst(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    jobs = poisson(options.data["chat"], BURST_PER_S, 77, most=options.requests, longest_prompt=300)
    ours, direct = Door(stack.url, stack.key), Door(options.vllm)

    def measured(door: Door, priority: Callable[[Job], int] = lambda job: 0) -> dict[str, Any]:
        with watching(options.vllm) as seen:
            timed, seconds = open_loop(door, fresh(jobs, priority))
        return brief(timed, seconds) | {"server": seen()}

    result: dict[str, Any] = {"per_s": BURST_PER_S, "mean_output": statistics.mean(job.output for job in jobs)}

    def held(ordering: str, seqs: int, room_margin: float = ROOM_MARGIN) -> dict[str, Any]:
        stack.change({"ROOM_MARGIN": room_margin}, ordering_policy=ordering, max_num_seqs=seqs)
        return measured(ours)

    def noisy() -> dict[str, Any]:
        with noisy_gateway(stack, options) as url:
            return measured(Door(url, stack.key))

    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "vllm_fcfs": lambda: measured(direct),
        "ours_fcfs": lambda: held("fcfs", 256),
        "vllm_shortest": lambda: measured(direct, lambda job: job.output),
        "ours_shortest": lambda: held("ssjf", 256),
        "ours_shortest_margin_1": lambda: held("ssjf", 256, 1.0),
        "ours_shortest_all_256": lambda: held("ssjf", 256, NO_LIMIT),
        "ours_fcfs_all_256": lambda: held("fcfs", 256, NO_LIMIT),
        "ours_shortest_128": lambda: held("ssjf", 128, NO_LIMIT),
        "ours_shortest_noisy": noisy,
    }
    for name, arm in arms.items():
        guarded(result, name, arm, options)
    stack.change({"ROOM_MARGIN": ROOM_MARGIN}, ordering_policy="priority", max_num_seqs=256)
    return result


@contextlib.contextmanager
def noisy_gateway(stack: Stack, options: argparse.Namespace) -> Iterator[str]:
    """A second web process with noisy lengths, on a copy of the rows, alone."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pilothouse-noisy-") as folder:
        state = Path(stack.environment["PILOTHOUSE_STATE_DIR"])
        source, copy = state / "pilothouse.sqlite3", Path(folder) / "pilothouse.sqlite3"
        import sqlite3

        with contextlib.closing(sqlite3.connect(source)) as rows, contextlib.closing(sqlite3.connect(copy)) as target:
            rows.backup(target)
        own = stack.environment | {"PILOTHOUSE_STATE_DIR": folder, "REDIS_URL": "redis://127.0.0.1:1/0"}
        stack_environment, stack.environment = stack.environment, own
        try:
            columns = {"ordering_policy": "ssjf", "max_num_seqs": 256}
            stack.code(CHANGE, json.dumps(columns), json.dumps({"ROOM_MARGIN": ROOM_MARGIN}))
        finally:
            stack.environment = stack_environment
        with process(uvicorn("tests.bench._noisy_lengths:application", port), port, own, wait_s=60.0):
            url = f"http://127.0.0.1:{port}"
            stack.wait_for_instance(url, stack.key)
            yield url


def mixed(stack: Stack, options: argparse.Namespace) -> dict[str, Any]:
    """Interactive requests alone and alongside batches of short prompts, with other slowdowns, and of long prompts."""
    result: dict[str, Any] = {}
    stack.change(ordering_policy="priority", max_num_seqs=256)
    jobs = poisson(options.data["conv"], options.rate, 5, seconds=options.seconds)

    def interactive() -> dict[str, Any]:
        with watching(options.vllm) as seen:
            timed, seconds = open_loop(Door(stack.url, stack.key), fresh(jobs))
        return brief(timed, seconds) | {"server": seen()}

    def alongside(name: str, slowdown: float, longest_prompt: int) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            stack.change({"NIW_SLOWDOWN": slowdown, "ROOM_MARGIN": NO_LIMIT if slowdown == NO_LIMIT else ROOM_MARGIN})
            lines = poisson(options.data[name], 1.0, 6, most=options.lines, longest_prompt=longest_prompt)
            batch = start_batch(stack, fresh(lines))
            begun = counts(stack, batch)
            began_s = time.perf_counter()
            figures = interactive()
            ended, seconds = counts(stack, batch), time.perf_counter() - began_s
            done = ended["completed"] - begun["completed"]
            with contextlib.suppress(urllib.error.HTTPError):  # it has ended
                call(f"{stack.url}/v1/batches/{batch}/cancel", stack.key, {})
            until_s = time.perf_counter() + 60
            while time.perf_counter() < until_s and state_of(stack, batch)["status"] not in ("cancelled", "completed"):
                time.sleep(0.5)
            return figures | {"lines_per_s": round(done / seconds, 2), "lines": done, "lines_failed": ended["failed"],
                            "ended_as": state_of(stack, batch)["status"]}  # fmt: skip

        return run

    guarded(result, "alone", interactive, options)
    guarded(result, "with_batch", alongside("chat", SLOWDOWN, 300), options)
    guarded(result, "with_batch_slowdown_1.5", alongside("chat", 1.5, 300), options)
    guarded(result, "with_batch_by_use_alone", alongside("chat", NO_LIMIT, 300), options)
    guarded(result, "with_batch_of_long_prompts", alongside("conv", SLOWDOWN, 12_000), options)
    return result


def start_batch(stack: Stack, jobs: Sequence[Job]) -> str:
    """Upload *jobs* as lines, create their batch and wait until some are done."""
    lines = "".join(
        json.dumps({"custom_id": f"line-{at}", "method": "POST", "url": "/v1/chat/completions",
                    "body": body(job, "chat/completions")}) + "\n"
        for at, job in enumerate(jobs)
    )  # fmt: skip
    mark = "pilothouse-bench"
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{mark}\r\n'
        'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
        f"{lines}\r\n--{mark}--\r\n"
    ).encode()
    kind = f"multipart/form-data; boundary={mark}"
    file = json.loads(call(f"{stack.url}/v1/files", stack.key, form, content_type=kind))
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = str(json.loads(call(f"{stack.url}/v1/batches", stack.key, wanted))["id"])
    until_s = time.perf_counter() + 60
    while counts(stack, batch)["completed"] < len(jobs) / 50:
        state = state_of(stack, batch)
        if state["status"] not in ("validating", "in_progress") or time.perf_counter() > until_s:
            raise RuntimeError(f"the batch does not run: {state}")
        time.sleep(0.5)
    return batch


def state_of(stack: Stack, batch: str) -> dict[str, Any]:
    return dict(json.loads(call(f"{stack.url}/v1/batches/{batch}", stack.key)))


def counts(stack: Stack, batch: str) -> dict[str, int]:
    return state_of(stack, batch)["request_counts"] or {"completed": 0, "failed": 0, "total": 0}


def adapters(stack: Stack | None, options: argparse.Namespace) -> dict[str, Any]:
    """Time loads of adapters, then first tokens in cycles over as many as the GPU holds, or CPU memory, and over all."""
    folders = sorted(options.adapters.iterdir(), key=lambda path: int(path.name[1:]))
    door = Door(options.vllm)
    loads_s = []
    for folder in folders:
        began_s = time.perf_counter()
        call(f"{options.vllm}/v1/load_lora_adapter", data={"lora_name": folder.name, "lora_path": str(folder)})
        loads_s.append(time.perf_counter() - began_s)
    result: dict[str, Any] = {
        "adapter_mb": round(sum(file.stat().st_size for file in folders[0].iterdir()) / 1e6, 1),
        "load_ms": [round(1000 * load_s, 1) for load_s in loads_s],
    }

    def cycle(names: Sequence[str], times: int) -> dict[str, Any]:
        async def run(session: Any) -> list[Timed]:
            first = next(_numbers)
            jobs = [Job(first + at, 0.0, 128, 2) for at in range(times * len(names))]
            return [await one(session, door, job, names[at % len(names)]) for at, job in enumerate(jobs)]

        timed = in_processes([run])[len(names) :]  # the first round brings them there
        return brief(timed, 1.0) | {"ttft_ms": [round(1000 * one.ttft_s, 1) for one in timed if one.ttft_s]}

    names = [folder.name for folder in folders]
    sizes = {
        "none": [MODEL],
        "on_gpu": names[:GPU_ADAPTERS],
        "in_cpu_memory": names[: CPU_ADAPTERS - 2],
        "on_disk": names,
    }
    for name, mine in sizes.items():
        guarded(result, name, lambda mine=mine: cycle(mine, 21 if len(mine) == 1 else 1 + -(-20 // len(mine))), options)
    return result


# What the server says of itself

SERIES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_use": "vllm:kv_cache_usage_perc",
    "output_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
}


def server_says(url: str) -> dict[str, float]:
    text = call(f"{url}/metrics").decode()
    said = {}
    for key, name in SERIES.items():
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        said[key] = sum(map(float, values))
    return said | {"at_s": time.perf_counter()}


@contextlib.contextmanager
def watching(url: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Read the server's metrics every half second; what is called at the end sums them up."""
    context = multiprocessing.get_context("fork")
    channel, stop = context.Queue(), context.Event()

    def watch() -> None:
        samples = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                samples.append(server_says(url))
            stop.wait(0.5)
        channel.put(samples)

    child = context.Process(target=watch)
    child.start()
    said: dict[str, float] = {}
    try:
        yield lambda: said
    finally:
        stop.set()
        samples = channel.get(timeout=30)
        child.join()
    if len(samples) > 1:
        spent_s = samples[-1]["at_s"] - samples[0]["at_s"]
        said |= {
            "running_mean": round(statistics.mean(one["running"] for one in samples), 1),
            "running_max": max(one["running"] for one in samples),
            "waiting_mean": round(statistics.mean(one["waiting"] for one in samples), 1),
            "waiting_max": max(one["waiting"] for one in samples),
            "kv_use_mean": round(statistics.mean(one["kv_use"] for one in samples), 4),
            "kv_use_max": round(max(one["kv_use"] for one in samples), 4),
            "output_tokens_per_s": round((samples[-1]["output_tokens"] - samples[0]["output_tokens"]) / spent_s),
            "prompt_tokens_per_s": round((samples[-1]["prompt_tokens"] - samples[0]["prompt_tokens"]) / spent_s),
        }


def guarded(
    result: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]], options: argparse.Namespace
) -> None:
    """Measure, or note why not: one measurement that fails costs no other."""
    if options.arms and name not in (*PARTS, *options.arms.split(",")):
        return
    if time.perf_counter() > options.until_s:
        result[name] = {"skipped": "no time left"}
        return
    began_s = time.perf_counter()
    try:
        result[name] = measure()
    except Exception as error:
        result[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
    print(f"{name} ({time.perf_counter() - began_s:.1f} s): {json.dumps(result[name])}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not options.vllm:
        return {"skipped": "no --vllm: it needs a server of tests.bench._gpu_server"}
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.until_s = time.perf_counter() + options.within_s
    options.out.mkdir(parents=True, exist_ok=True)
    options.data = json.loads(options.lengths.read_text()) if set(parts) - {"adapters"} else {}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pilothouse-gpu-") as folder:
        stack = Stack(Path(folder), options.vllm) if set(parts) - {"adapters"} else None
        try:
            for part in parts:
                measure = {"overhead": overhead, "burst": burst, "mixed": mixed, "adapters": adapters}[part]
                guarded(result, part, lambda measure=measure: measure(stack, options), options)
                (options.out / f"{part}.json").write_text(json.dumps(result[part], indent=1))
        finally:
            if stack is not None:
                stack.stop()
                (options.out / "up.log").write_text(stack.log.read_text())
    return result
