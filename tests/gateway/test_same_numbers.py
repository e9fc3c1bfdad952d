"""Every number that planners look at is the same on each page, over REST, in `/metrics`, and in the emulated servers' own
counters where they have it: one table, read at one moment.
"""

import asyncio
import html
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.db.models import F, Sum
from django.test import Client
from django.utils import timezone
from prometheus_client import generate_latest

from controlplane import operations as module
from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.api.routers import system
from controlplane.batches import feeder, services
from controlplane.batches.models import Batch
from controlplane.console.formats import count, duration, milliseconds, percent_fine, quantity, times, usd
from controlplane.console.live.feed import feed
from controlplane.fleet.models import Deployment, GpuType, Instance, Model, Node, Region, SloClass
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.operations import Operations
from controlplane.planning.models import ScalingPlan
from tests.console.conftest import live  # noqa: F401 (fixture)
from tests.gateway.conftest import do_once, emulate_two, gateway_before, until
from tests.gateway.rows import make_model
from tests.workers.conftest import SLOW, emulator  # noqa: F401 (fixture)

ABLE = 400.0  # tokens a second of an instance, as the plan counts
SEQUENCES = 2  # of an instance
LINES, DONE, OPEN = 24, 8, 4
"""Of a batch: all, those that are done when the fleet becomes full, and those that are read at once."""
Where = dict[str, str]
PAGES = {
    "overview": "/",
    "models": "/models/",
    "model m": "/models/m/",
    "fleet": "/fleet/",
    "queues of east": "/queues/?region=east",
    "queues of west": "/queues/?region=west",
    "batches": "/batches/",
}


@pytest.fixture
async def served(transactional_db, emulator, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    files = {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": {"location": str(tmp_path)}}
    monkeypatch.setattr(settings, "STORAGES", settings.STORAGES | {"files": files})
    monkeypatch.setattr(services, "send_task", lambda task, *given: services.validate_batch(*given))
    monkeypatch.setattr(feeder, "MAX_OPEN", OPEN)
    do_once(monkeypatch)
    _, backends = await emulate_two(emulator, ["east", "west"], SEQUENCES, profile=SLOW)
    third = await emulator.ready("c", profile=SLOW, seed=7, max_num_seqs=SEQUENCES, model="n")
    await database_sync_to_async(furnish)(f"{emulator.url}/{third.name}")
    async with gateway_before([*backends, third], emulator=emulator) as served:
        yield served


def furnish(url: str) -> None:
    """Another model in the east at *url*, nodes with GPUs below all instances, one cordoned, and who reads of them."""
    make_model("n", url, max_num_seqs=SEQUENCES)
    Deployment.objects.update(tensor_parallel=2)
    gpu_type = GpuType.objects.get()
    for region in Region.objects.all():
        node = Node.objects.create(name=f"node-{region}", region=region, gpu_type=gpu_type, gpu_count=8)
        Instance.objects.filter(deployment__region=region).update(node=node)
    west = Region.objects.get(name="west")
    Node.objects.create(name="shut", region=west, gpu_type=gpu_type, gpu_count=4, cordoned="operator: repairs")
    patient = SloClass.objects.create(
        name="patient", title="Patient", kind="interactive", ttft_target_ms=60_000, priority=7
    )
    Tenant.objects.get().slo_classes.add(patient)
    tenant = Tenant.objects.create(name="ops", operates_fleet=True, default_slo_class=SloClass.objects.first())
    Membership.objects.create(user=User.objects.create(username="reader"), tenant=tenant, role=Role.VIEWER)


def planned_and_aged() -> None:
    """Plans that value an instance, and traffic old enough to count as demand."""
    for model in Model.objects.all():
        ScalingPlan.objects.create(
            model=model,
            strategy="lt_ua",
            status="shadow",
            valid_until=timezone.now() + timedelta(hours=1),
            inputs={"capability_tokens_per_s": {"h100": {"used": ABLE}}},
        )
    MinuteRow.objects.update(minute=F("minute") - timedelta(minutes=3))


async def ask(served, counts: dict[tuple[str, str, str], int], tokens: int) -> list[asyncio.Task[bytes]]:
    """Begin streams of *tokens*, so many by (model, region of the caller, SLO class)."""

    async def answered(model: str, region: str, slo_class: str) -> bytes:
        headers = {"X-Region": region, "X-SLO-Class": slo_class}
        answer = await served.chat(headers, model=model, stream=True, ignore_eos=True, max_tokens=tokens)
        assert answer.status == 200
        return await answer.read()

    return [asyncio.create_task(answered(*key)) for key, number in counts.items() for _ in range(number)]


async def begin_batch(served) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(LINES))
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", io.BytesIO(lines.encode()), filename="in.jsonl")
    async with served.http.post(f"{served.url}/v1/files", data=form, headers=served.headers) as response:
        file = (await response.json())["id"]
    given = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with served.post("/v1/batches", given) as response:
        assert response.status == 200


class Said:
    """What every surface said at one moment."""

    def __init__(self, summary: dict[str, Any], metrics: str, servers: list[Any]) -> None:
        self.summary, self.servers = summary, servers
        self.samples = [
            (match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")), float(match[3]))
            for match in re.finditer(r"^pilothouse_(\w+?)(?:\{(.*)\})? (\S+)$", metrics, re.MULTILINE)
        ]
        client = Client()
        client.force_login(User.objects.get(username="reader"))
        self.pages = {name: client.get(path).content.decode() for name, path in PAGES.items()}
        self.rest = {path: client.get(f"/api/{path}").json() for path in ("endpoints", "nodes", "batches", "queues")}

    def metric(self, name: str, where: Where) -> float:
        """Return the sum of the samples that have these labels, as a panel shows it."""
        found = [
            value
            for one, labels, value in self.samples
            if one == name and all(labels.get(label) == value for label, value in where.items())
        ]
        assert found, (name, where)
        return sum(found)

    def rows(self, name: str) -> list[dict[str, Any]]:
        if name in self.rest:
            return self.rest[name].get("items") or self.rest[name]["regions"]
        return system.summary_rows(self.summary, name.removesuffix("."))

    def element(self, page: str, kind: str, name: str = "") -> str:
        """Return the text of a tile by its label, of a panel's head by its title, of a cell by its row's head and number."""
        body = self.pages[page]
        if kind == "tile":
            texts = map(plain, re.findall(r'<li class="tile".*?</li>', body, re.DOTALL))
            return next(text for text in texts if text.startswith(name))
        if kind == "cell":
            head, at = name.split()
            rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
            heads = (re.search(r"<th.*?</th>", row, re.DOTALL) for row in rows)
            row = next(row for row, one in zip(rows, heads, strict=True) if one and plain(one[0]).split(" ")[0] == head)
            return plain(re.findall(r"<td.*?</td>", row, re.DOTALL)[int(at)])
        wanted = {"verdict": r'<h2 class="verdict.*?</h2>', "panel": rf"<header>\s*<h2[^>]*>{name}</h2>.*?</header>"}
        return plain(*re.findall(wanted[kind], body, re.DOTALL))


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@dataclass(frozen=True)
class Number:
    """A number: how REST, `/metrics` (name and labels) and servers give it, and where pages show it.

    A line of *shown* has the page, the element, the words with the number there, and what it is narrowed to.
    """

    rest: Callable[[Said, Where], float]
    metric: str
    shown: str
    format: Callable[[float], str] = count
    labels: Where = field(default_factory=dict)
    whole: Where = field(default_factory=dict)
    """Labels of the metric where it is narrowed to nothing."""
    sum: str = ""
    """Metric that has its sum besides."""
    scale: float = 1.0
    """Of the metric's unit in that of REST."""
    server: Callable[[Any], float] | None = None
    moves: bool = False
    """Whether it changes while surfaces are asked."""

    def places(self) -> Iterator[tuple[str, list[str], str, Where]]:
        for line in filter(None, map(str.strip, self.shown.splitlines())):
            page, element, words, *where = (part.strip() for part in line.split("|"))
            yield page, element.split(" ", 1), words, dict(part.split("=") for part in " ".join(where).split())


def summed(table: str, name: str) -> Callable[[Said, Where], float]:
    """Return the sum of a field over the rows of a list of REST; a dot after its name: of a table of `/api/summary`."""

    def of(said: Said, where: Where) -> float:
        rows = said.rows(table)
        return sum(row[name] or 0 for row in rows if all(row[key] == value for key, value in where.items()))

    return of


def tile(name: str) -> Callable[[Said, Where], float]:
    """Return a field of the fleet, or of a model, in `GET /api/summary`."""

    def of(said: Said, where: Where) -> float:
        return said.summary["models"][where["model"]][name] if where else said.summary["fleet"][name]

    return of


def total(name: str) -> Callable[[Said, Where], float]:
    """Return a field of `GET /api/endpoints`: of its total, or summed over rows, which come to the same here."""

    def of(said: Said, where: Where) -> float:
        if not where:
            assert said.rest["endpoints"]["total"][name] == pytest.approx(summed("endpoints", name)(said, {}))
            return said.rest["endpoints"]["total"][name]
        return summed("endpoints", name)(said, where)

    return of


FLEET, INTERACTIVE = {"model": ""}, {"slo_class": "interactive"}
TTFT = {"of": "ttft", "quantile": "0.95"}
LIVE, LOAD, GPUS = "endpoints.", "endpoints", "nodes"
NUMBERS = {
    "output tok/s": Number(summed(LIVE, "output_tokens_per_s"), "output_tokens_per_second", """
        overview | tile Output | {} tok/s
        overview | cell m 4 | {} | model=m
        fleet | cell east 6 | {} | region=east
        fleet | cell west 6 | {} | region=west
        model m | cell east 3 | {} | model=m region=east
    """, quantity),
    "prompt tok/s": Number(summed(LIVE, "prompt_tokens_per_s"), "prompt_tokens_per_second", """
        overview | tile Output | prompts {}
    """, quantity),
    "demand": Number(total("demand_tokens_per_s"), "demand_tokens_per_second", """
        models | tile Demand | Demand {}
        model m | tile Demand | Demand {} | model=m
    """, quantity, sum="fleet_demand_tokens_per_second"),
    "capacity": Number(total("capacity_tokens_per_s"), "capacity_tokens_per_second", """
        models | tile Demand | of {} tok/s
        model m | cell east 4 | of {} | model=m region=east
    """, quantity, sum="fleet_capacity_tokens_per_second"),
    "instances ready": Number(total("instances_ready"), "instances_ready", """
        overview | tile Instances ready | {} of 3
        overview | cell m 0 | {} of 2 | model=m
        models | tile Instances ready | {} limit
        models | cell m 1 | {} of | model=m
        model m | tile Instances ready | {} limit | model=m
        fleet | cell east 0 | {} saturated | region=east
    """),
    "GPUs that serve or start": Number(total("gpus"), "endpoint_gpus", """
        overview | panel Instances | {} GPUs serve or start
    """),
    "GPUs used": Number(summed(GPUS, "gpus_used"), "gpus", """
        fleet | cell east 1 | {} of 8 GPUs used | region=east
        fleet | cell west 1 | {} of 12 GPUs used | region=west
    """, labels={"state": "used"}),
    "GPUs free": Number(summed(GPUS, "gpus_free"), "gpus", """
        fleet | cell east 1 | {} free | region=east
        fleet | cell west 1 | {} free | region=west
    """, labels={"state": "free"}),
    "GPUs cordoned": Number(summed(GPUS, "gpus_cordoned"), "gpus", """
        fleet | cell west 1 | {} cordoned | region=west
    """, labels={"state": "cordoned"}),
    "cost an hour": Number(total("usd_per_hour"), "cost_usd_per_hour", """
        overview | panel Instances | {} an hour
        models | tile Cost | {} an hour
        models | cell n 6 | {} | model=n
        model m | tile Cost | {} an hour | model=m
    """, usd),
    "SLO met": Number(tile("slo_met_ratio"), "slo_met_ratio", """
        overview | tile SLO met | {} interactive
        overview | cell m 1 | {} | model=m
        models | tile SLO met | {} interactive
        models | cell m 4 | {} interactive | model=m
        model m | tile SLO met | {} interactive | model=m
    """, percent_fine, INTERACTIVE, FLEET),
    "burn": Number(tile("slo_burn"), "slo_burn", """
        overview | tile SLO met | burn {}
    """, times, INTERACTIVE, FLEET),
    "TTFT p95 of the class": Number(tile("ttft_p95_ms"), "latency_seconds", """
        overview | tile TTFT p95, interactive | {} all classes
        overview | cell m 2 | {} | model=m
        batches | tile TTFT p95, interactive | {} all classes
        models | cell m 5 | {} | model=m
        model m | tile TTFT p95 | {} | model=m
    """, milliseconds, TTFT | INTERACTIVE, FLEET, scale=1000),
    "TTFT p95 of all classes": Number(tile("ttft_all_p95_ms"), "latency_seconds", """
        overview | tile TTFT p95 | all classes {}
        batches | tile TTFT p95 | all classes {}
    """, milliseconds, TTFT | {"slo_class": ""}, FLEET, scale=1000),
    "running": Number(summed(LIVE, "running"), "running", """
        overview | tile Requests | {} running
        fleet | cell east 2 | {} | region=east
        fleet | cell west 2 | {} | region=west
    """, server=lambda server: server.running),
    "waiting": Number(summed(LIVE, "waiting"), "waiting", """
        overview | tile Waiting | {} req
        overview | cell n 3 | {} | model=n
        queues of east | tile Waiting | {} req | region=east
        queues of west | tile Waiting | {} req | region=west
    """),
    "waiting of a region": Number(summed("queues", "waiting"), "waiting", """
        queues of east | tile Waiting | {} req | region=east
    """),
    "held": Number(summed("held.", "count"), "held", """
        overview | tile Waiting | {} held
        overview | cell m 3 | + {} held | model=m
        batches | tile Held work | {} held
        queues of east | cell m 0 | {} | model=m
    """),
    "lines to come": Number(summed("held.", "announced"), "announced_lines", """
        batches | tile Held work | {} lines to come
        queues of west | cell m 1 | {} | model=m
    """),
    "deferred lines": Number(summed("batches", "lines_left"), "deferred_lines", """
        batches | tile Lines per second | {} lines left
    """),
    "deadline slack": Number(
        lambda said, where: min(row["slack_s"] for row in said.rows("batches")), "deadline_slack_seconds", """
        batches | verdict | the least slack {}
    """, duration, moves=True),
}  # fmt: skip


async def test_every_surface_says_the_same(served, monkeypatch):
    # Requests of three classes, models and regions that end; interactive ones come faster than they are served, and miss.
    keys = {("m", "east", "interactive"): 14, ("m", "west", "interactive"): 8, ("n", "east", "interactive"): 6}
    keys |= {("m", "west", "flexible"): 4, ("n", "east", "patient"): 12}
    await asyncio.gather(*await ask(served, keys, 12))
    rows = await served.rows()
    servers = [await served.extra["emulator"].metrics(name) for name in ("a", "b", "c")]
    sums = await database_sync_to_async(LedgerRow.objects.aggregate)(
        prompt=Sum("prompt_tokens"), output=Sum("output_tokens")
    )
    assert len(rows) == sum(keys.values())
    assert sums["output"] == 12 * len(rows) == sum(each.generation_tokens_total for each in servers)
    assert sums["prompt"] == sum(each.prompt_tokens_total for each in servers)
    async with served.http.get(f"{served.url}/metrics") as response:
        counted = re.findall(r'^pilothouse_tokens_total\{kind="(\w+)".*\} (\S+)$', await response.text(), re.MULTILINE)
    assert sums == {kind: sum(float(value) for one, value in counted if one == kind) for kind in ("prompt", "output")}

    # A batch at its pace, and then more streams than there is room for: they wait, and its lines are held.
    await begin_batch(served)
    done = database_sync_to_async(lambda: Batch.objects.get().completed)
    async with asyncio.timeout(60):
        while await done() < DONE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    streams = {("m", "east", "interactive"): 5, ("m", "west", "interactive"): 4, ("n", "east", "interactive"): 7}
    tasks = await ask(served, streams, 900)
    summary = served.gateway.publisher.summary

    def full() -> bool:
        shown = summary.snapshot()
        waiting = shown["endpoints"]["waiting"]
        return shown["fleet"]["running"] == 3 * SEQUENCES and all(waiting) and shown["fleet"]["held"] > 0

    await until(full)
    await asyncio.sleep(1.5)  # answers of lines are written, and what is published once a second is of now
    await served.gateway.ledger.flush()
    await database_sync_to_async(planned_and_aged)()

    operations = Operations(served.gateway)
    await operations._read_capacity()
    snapshot, metrics = (
        summary.snapshot(),
        generate_latest(operations.registry).decode(),
    )  # nothing happens between them
    servers = [await served.extra["emulator"].metrics(name) for name in ("a", "b", "c")]
    monkeypatch.setattr(system, "read_published", lambda key: orjson.dumps(snapshot))
    feed.read_summary(orjson.dumps(snapshot))
    said = await database_sync_to_async(Said)(snapshot, metrics, servers)
    for task in tasks:
        task.cancel()

    wrong = [f"{name}: {words}" for name, number in NUMBERS.items() for words in differences(said, number)]
    assert not wrong, "\n".join(wrong)
    fleet = snapshot["fleet"]
    assert fleet["slo_burn"] > 1
    assert fleet["ttft_all_p95_ms"] > fleet["ttft_p95_ms"]
    assert {each["slo_class"] for each in fleet["slo_classes"]} == {"interactive", "patient", "flexible"}
    for name in ("running", "waiting", "output_tokens_per_s", "prompt_tokens_per_s", "instances_ready"):
        assert fleet[name] == pytest.approx(summed("endpoints.", name)(said, {}), abs=0.2)


def differences(said: Said, number: Number) -> Iterator[str]:
    """Yield where surfaces do not say *number* as REST does."""

    def metric(where: Where, name: str = "") -> float:
        return number.scale * said.metric(name or number.metric, number.labels | (where or number.whole))

    places = list(number.places())
    for where in [{}, *(where for *_, where in places)]:
        names = ("", number.sum) if number.sum and not where else ("",)
        rest, metrics = number.rest(said, where), [metric(where, name) for name in names]
        if not rest or metrics != [pytest.approx(rest, rel=1e-3, abs=60 if number.moves else 0.06)] * len(names):
            yield f"REST says {rest} {where}, /metrics {metrics}"
    if number.server and (servers := sum(map(number.server, said.servers))) != number.rest(said, {}):
        yield f"servers say {servers}"
    for page, element, words, where in places:
        values = (number.rest(said, where), *([metric({})] if number.moves else ()))
        text, expected = said.element(page, *element), {words.format(number.format(value)) for value in values}
        if not any(re.search(rf"(?<![\d.,]){re.escape(each)}(?![\d%])", text) for each in expected):
            yield f"{page} says {text!r}, not {expected}"


@pytest.mark.django_db(transaction=True)
async def test_a_scrape_that_would_wait_long_has_the_figures_of_the_one_before(monkeypatch):
    slow, figures = threading.Event(), iter(("first", "second"))
    slow.set()
    monkeypatch.setattr(module, "read_capacity", lambda: slow.wait(10) and next(figures))
    monkeypatch.setattr(module, "CAPACITY_WAIT_S", 0.3)
    monkeypatch.setattr(module, "generate_latest", lambda _: operations.collector.capacity)
    gateway: Any = SimpleNamespace(dispatching=object(), database_job=SimpleNamespace(ok=True))
    operations, scope = Operations(gateway), {"headers": (), "client": ("127.0.0.1", 1)}

    async def scraped() -> Any:
        return (await operations.metrics(scope))[2]

    assert await scraped() == "first"
    slow.clear()
    assert await scraped() == "first"
    slow.set()
    assert await scraped() == "second"
    monkeypatch.setattr(module, "CAPACITY_KEPT_S", -1.0)
    assert await scraped() is None
