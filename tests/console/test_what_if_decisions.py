"""Decisions side by side: the page, its links, its file, and its empty state."""

import pytest

from controlplane.accounts.models import User
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.models import FutureSeed, WhatIf
from controlplane.simulation.whatif.results import compared
from scheduling.simulation.measures.differences import ROWS
from tests import database
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
MORE = {"name": "Three at least", "changes": [{"kind": "bounds", "model": "m", "min_instances": 3}]}


def run_more() -> None:
    operator = User.objects.get(username="operator")
    rows.run_all(services.submit(rows.draft(operator, MORE, seeds=1), operator))


@pytest.fixture
def ran(operator):
    database.write(run_more)
    return WhatIf.objects.get()


def shown(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_every_difference_is_kept_with_the_decisions_around_it(ran):
    known = compared(ran, "B")
    decided = ran.futures.get(letter="B").decides
    assert decided
    assert set(known) == {(each["kind"], each["region"]) for each in decided}
    for each in decided:
        pairs = known[each["kind"], each["region"]]
        assert len(pairs.rows) <= ROWS
        assert pairs.rows[pairs.marked].differs
        assert pairs.rows[pairs.marked].at_s == pytest.approx(each["at_s"], abs=0.06)
    assert compared(ran, "A") == {}
    assert not FutureSeed.objects.filter(log__isnull=False).exists()


def test_the_page_has_both_columns_and_marks_the_first_difference(reader, ran):
    future = ran.futures.get(letter="B")
    one = future.decides[0]
    comparison = shown(reader, f"/what-if/{ran.pk}/")
    address = f"/what-if/{ran.pk}/decisions/B/"
    query = f"kind={one['kind']}&amp;region={one['region']}"
    assert "One seed shows no difference between a decision and chance" in comparison
    assert f'href="{address}"' in comparison
    page = shown(reader, f"{address}?{query.replace('&amp;', '&')}")
    assert page.count('class="first-difference"') == 1
    assert one["effect"] in page
    assert "B Three at least" in page
    assert "first difference" in shown(reader, f"{address}?kind=nothing")
    answer = reader.get(f"{address}?{query.replace('&amp;', '&')}&format=csv")
    lines = b"".join(answer.streaming_content).decode().splitlines()
    pairs = compared(ran, "B")[one["kind"], one["region"]]
    assert lines[0].startswith("Time (UTC),After the start (s),Model,A,B Three at least")
    assert len(lines) == 1 + len(pairs.rows)


def effects_are(future, *waiting: float) -> None:
    """Outcome of the first difference of *future*, seed by seed."""
    one, run = future.decides[0], future.runs.get(seed=1)
    future.runs.exclude(seed=1).delete()
    for seed, value in enumerate(waiting, 1):
        run.pk = run.pk if seed == 1 else None
        run.seed, run.result = seed, run.result | {"effects": {f"{one['kind']} {one['region']}": [0.0, value]}}
        run.save()


@pytest.mark.parametrize(
    ("waiting", "effect"),
    [
        ((-5.0, -6.0, -5.5), "\N{MINUS SIGN}5.5 ±1.2 waiting within 15 min, over 3 seeds"),
        ((-9.0, 4.0, 5.0), ""),  # chance: one seed against the others
        ((-5.0, 0.0, 0.0), ""),  # in one seed alone
        ((-0.1, -0.1, -0.1), ""),  # nothing visible
    ],
)
def test_what_decides_is_named_with_its_effect_over_all_seeds(ran, waiting, effect):
    effects_are(ran.futures.get(letter="B"), *waiting)
    assert [each["effect"] for each in selectors.decides(ran)] == ([effect] if effect else [])


def test_there_are_none_of_a_itself_nor_of_a_future_with_other_requests(reader, ran):
    assert "No decisions of A As now are kept" in shown(reader, f"/what-if/{ran.pk}/decisions/A/")
    assert reader.get(f"/what-if/{ran.pk}/decisions/F/").status_code == 404
    FutureSeed.objects.update(pairs=None)
    assert "No decisions of B Three at least are kept" in shown(reader, f"/what-if/{ran.pk}/decisions/B/")
    assert "Side by side" not in shown(reader, f"/what-if/{ran.pk}/")
