"""Pages that say the same of one thing: what waits and is held, what is wrong, how a new model is scaled."""

import re

import pytest
from django.core.management import call_command

from controlplane.alerts.models import Alert
from controlplane.alerts.services import acknowledge
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.simulation.whatif.fork import _without_strategy
from tests.console.conftest import rows_of
from tests.console.feed import Feed

pytestmark = pytest.mark.django_db


class Holding(Feed):
    """A feed where nothing waits in queues, and 350 requests are held."""

    def tile(self, *args):
        return super().tile(*args) | {"waiting": 0, "held": 350}


@pytest.mark.parametrize("path", ["/", "/?model=llama-3.1-8b"])
def test_held_requests_stand_next_to_waiting_ones(reader, live, make_instance, path):
    live.show(Holding(rows_of([make_instance(name="one")])))
    shown = re.sub(r"<[^>]*>", " ", reader.get(path).content.decode())
    assert "350 held" in shown
    assert "Nothing waits." not in shown


def test_overview_lists_what_is_open_and_the_navigation_counts_the_same(acting, operator, live, make_instance):
    feed = Feed(rows_of([make_instance(state="failed", name=name) for name in ("one", "two")]))
    feed.trouble = {"redis": {"state": "down", "detail": "refused"}}
    live.show(feed)
    live.judge()
    acknowledge(Alert.objects.get(subject="two"), operator)
    live.judge()
    page = acting.get("/").content.decode()
    shown = page.partition('<ul class="event-list" aria-label="Needs attention"')[2].partition("</ul>")[0]
    assert [name in shown for name in ("one failed", "two failed", "Redis: down")] == [True, False, True]
    assert "1 more is" in page
    counts = dict(re.findall(r'data-fragment="badge/(\w+)"><span class="count">(\d+)', page))

    assert counts["overview"] == str(sum(int(counts[name]) for name in counts.keys() - {"overview"}))
    alerts = acting.get("/alerts/").content.decode()
    assert f'badge/alerts"><span class="count">{counts["overview"]}<' in alerts
    assert len(re.findall(r'<tr><th scope="row"', alerts.partition('id="rules"')[0])) == int(counts["overview"])


@pytest.mark.parametrize("mode", [None, *PolicyMode])
def test_a_model_is_scaled_as_the_api_says(reader, language_model, mode):
    if mode is not None:
        ScalingPolicy.objects.create(model=language_model, strategy="lt_u", mode=mode)
    said = reader.get("/api/scaling/policies").json()["items"][0]["mode"]
    remarks = _without_strategy({language_model.name})
    words = {"off": "scaling is off now", "shadow": "scaling is in shadow mode now"}.get(said)
    assert [words in remark for remark in remarks] == ([True] if words else [])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9123", "https://pilothouse.example"])
def test_a_sign_in_link_is_of_this_stack(operator, settings, capsys, url):
    settings.CONSOLE_URL = url
    call_command("sign_in_link", operator.username)
    assert capsys.readouterr().out.startswith(f"{url}/sign-in/")
