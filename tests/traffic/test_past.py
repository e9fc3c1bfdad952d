"""The demo's generated past: as its traffic would have left it, marked, once, and never in the way of what is counted."""

import random
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet import demo as inventory
from controlplane.fleet.models import Region
from controlplane.gateway.ledger import writer
from controlplane.gateway.ledger.entry import RequestRecord
from controlplane.gateway.models import MinuteRow
from controlplane.planning import demo as planning_demo
from controlplane.planning import demo_traffic as demo
from controlplane.planning.demo_traffic import EMBEDDED, LENGTHS, lengths, minutes
from scheduling.bundles import BUNDLES
from tests import database
from tests.examples import at_night_but
from workers.emulator import requested_length
from workers.emulator.text import count_tokens
from workers.traffic.prompts import Instructions
from workers.traffic.waves import (
    BURST_EVERY_S,
    BURST_FACTOR,
    BURST_S,
    DAY_S,
    EMBEDDINGS,
    KINDS,
    Stream,
    Waves,
    requested_tokens,
    streams,
)

NOW = datetime(2026, 3, 2, 12, 0, 40, tzinfo=UTC)
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def seed() -> None:
    inventory.seed("none")


@pytest.fixture
def seeded(db) -> None:
    database.write(seed)


def stream(**changes: object) -> Stream:
    (made,) = streams([("m", "us-east", 4096)], {"interactive": ""})
    return Stream(**{name: getattr(made, name) for name in made.__slots__} | changes)  # type: ignore[arg-type]


def answered(slo_class: str, context: int, count: int = 1_000) -> tuple[float, float]:
    """Mean prompt and output tokens of requests of the demo, as an emulated instance would answer them."""
    draw, instructions, kind = random.Random(7), Instructions(7), KINDS[slo_class]
    source = stream(slo_class=slo_class, context_tokens=context, kind=kind)
    prompts, outputs = [], []
    for number in range(count):
        prompt_tokens, output_tokens, most = requested_tokens(source, draw)
        prompt = instructions.prompt(prompt_tokens, output_tokens, kind.streamed > 0)
        prompts.append(count_tokens(prompt))
        asked = requested_length.read(prompt, prompts[-1])
        assert asked is not None
        bits = random.Random(number).getrandbits
        outputs.append(min(most, requested_length.draw(asked, bits(64), bits(64))))
    return float(np.mean(prompts)), float(np.mean(outputs))


@pytest.mark.parametrize(
    ("slo_class", "context"),
    at_night_but([(name, 4096) for name in LENGTHS], [(name, most) for name, by in LENGTHS.items() for most in by]),
)
def test_requests_are_as_long_as_the_demos(slo_class: str, context: int) -> None:
    prompt_tokens, output_tokens = answered(slo_class, context)
    known = lengths(slo_class, context)
    assert known[0] == pytest.approx(prompt_tokens, rel=0.15)
    assert known[2] == pytest.approx(output_tokens, rel=0.2)


def test_embeddings_are_as_long_as_the_demos() -> None:
    (source,) = streams([("e", "us-east", 32_768)], {"interactive": ""}, kinds=EMBEDDINGS)
    draw, traffic = random.Random(3), Waves("", [], seed=3)
    calls = [traffic.call(source, draw) for _ in range(2_000)]
    assert {path for path, _ in calls} == {"embeddings"}
    tokens = np.array([sum(count_tokens(text) for text in body["input"]) for _, body in calls])
    assert tokens.mean() == pytest.approx(EMBEDDED[0], rel=0.1)
    assert tokens.std() / tokens.mean() == pytest.approx(EMBEDDED[1], rel=0.15)
    rows = list(minutes([source], BEGIN, 600, seed=1))
    assert not any(row.output_tokens for row in rows)
    mean = sum(row.prompt_tokens for row in rows) / sum(row.requests for row in rows)
    assert mean == pytest.approx(EMBEDDED[0], rel=0.1)


def test_a_day_has_the_shape_and_the_level_of_the_traffic_to_come() -> None:
    source, days = stream(), 90
    rows = list(minutes([source], BEGIN, round(days * DAY_S / 60), seed=1))
    assert all(row.generated and row.requests and not row.slo_judged for row in rows)
    of_minute = np.zeros(round(DAY_S / 60))
    for row in rows:
        of_minute[int((row.minute - BEGIN).total_seconds() % DAY_S // 60)] += row.requests / days
    begin_s = BEGIN.timestamp()
    bursts = 1 + (BURST_FACTOR - 1) * BURST_S / (BURST_EVERY_S + BURST_S)
    expected = [
        60 * bursts * source.rate_per_s(begin_s + 60 * (minute + 0.5), burst=False) for minute in range(len(of_minute))
    ]
    assert of_minute == pytest.approx(expected, rel=0.12)
    prompt_tokens = sum(row.prompt_tokens for row in rows) / sum(row.requests for row in rows)
    assert prompt_tokens == pytest.approx(lengths("interactive", 4096)[0], rel=0.1)


def test_it_is_generated_once_ends_before_now_and_can_be_taken_away(seeded: None) -> None:
    rows = demo.generate_past(NOW, hours=0.5)
    assert rows == MinuteRow.objects.filter(generated=True).count() > 900
    assert set(MinuteRow.objects.values_list("region", flat=True)) == set(Region.objects.values_list("name", flat=True))
    newest, oldest = (MinuteRow.objects.order_by(by)[0].minute for by in ("-minute", "minute"))
    assert newest == NOW.replace(second=0) - timedelta(minutes=1)
    assert oldest == NOW.replace(second=0) - timedelta(minutes=30)
    assert demo.generate_past(NOW, hours=0.5) == 0
    counted = {"model": "llama-2-70b", "region": "us-east", "slo_class": "interactive", "requests": 1}
    MinuteRow.objects.create(minute=NOW.replace(second=0), **counted)
    assert demo.remove_past() == rows
    assert MinuteRow.objects.get().minute == NOW.replace(second=0)
    MinuteRow.objects.all().delete()
    assert demo.generate_past(NOW, hours=0.5) == 0
    assert list(Event.objects.filter(kind__startswith="demo.past").order_by("pk").values_list("kind", flat=True)) == [
        demo.ADDED,
        demo.REMOVED,
    ]


def test_a_fleet_that_has_counted_anything_is_given_no_past(seeded: None) -> None:
    MinuteRow.objects.create(minute=NOW, model="m", region="us-east", slo_class="interactive")
    assert demo.generate_past(NOW) == 0


def test_tenants_share_the_traffic_and_its_past_is_of_all_of_them(seeded: None) -> None:
    sources = [stream for tenant in demo.senders() for stream in demo.streams_to(tenant, tenant.name)]
    assert {stream.key for stream in sources} == set(demo.SHARES)
    series = {(stream.model, stream.region, stream.slo_class) for stream in sources}
    shares = [sum(each.share for each in sources if (each.model, each.region, each.slo_class) == one) for one in series]
    assert (len(series), set(shares)) == (37, {1.0})
    assert len(sources) > len(series)  # some classes are shared
    assert demo.generate_past(NOW, hours=2.0)
    assert set(MinuteRow.objects.values_list("model", "region", "slo_class")) == series
    assert {stream.key for stream in sources if stream.runs} == {"acme"}
    assert len([stream.region for stream in sources if stream.runs]) == 3


def test_jobs_are_sent_to_a_model_whose_requests_wait_in_groups_one_region_after_the_other(seeded: None) -> None:
    jobs = [each for tenant in demo.senders() for each in demo.streams_to(tenant, tenant.name) if each.job]
    assert {each.key for each in jobs} == {"globex"}
    assert {BUNDLES[planning_demo.GIVEN[each.model][0]].policy["ordering"] for each in jobs} == {"qlm"}
    assert len({each.region for each in jobs}) == len({each.phase for each in jobs}) == len(jobs) == 3


def test_without_its_tenants_there_is_none(seeded: None) -> None:
    Tenant.objects.filter(name__in=demo.SHARES).update(active=False)
    assert demo.generate_past(NOW) == 0


def test_counted_minutes_replace_generated_ones(seeded: None) -> None:
    series = {"model": "m", "region": "us-east", "slo_class": "interactive"}
    MinuteRow.objects.create(minute=NOW.replace(second=0), **series, requests=70, prompt_tokens=9_000, generated=True)
    tenant = Tenant.objects.get(name=next(iter(demo.SHARES)))
    record = {"tenant_id": tenant.pk, "outcome": "done", "prompt_tokens": 10, "output_tokens": 4, **series}
    for number in range(2):
        writer.write([RequestRecord(request_id=f"r{number}", arrived_at=NOW.timestamp(), **record)])  # type: ignore[arg-type]
    row = MinuteRow.objects.get()
    assert (row.requests, row.prompt_tokens, row.generated) == (2, 20, False)
