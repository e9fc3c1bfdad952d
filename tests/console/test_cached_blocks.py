"""What an instance has cached by its KV events, on its page, and how wrong expectations were."""

import pytest
from django.urls import reverse

from tests.console.conftest import rows_of
from tests.console.feed import Feed


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({"cached_blocks": 1204}, "1,204"),
        ({"cache_unknown": "events 3 to 8 are gone"}, 'title="events 3 to 8 are gone"'),
        ({}, None),
    ],
)
def test_the_page_of_an_instance_says_what_is_known_of_its_cache(reader, live, make_instance, known, shown):
    row = make_instance(state="ready")
    live.show(Feed([one | known for one in rows_of([row])]))
    html = reader.get(reverse("console:instance", args=[row.name])).content.decode()
    assert ("Cached, by KV events" in html) == (shown is not None)
    assert shown is None or shown in html


def test_expectations_of_either_kind_are_compared_with_what_was_reported(reader, make_instance, make_request):
    row = make_instance(state="ready")
    for by, expected in (("kv_events", 50), ("estimate", 80), ("", None)):
        cached = {"prompt_tokens": 100, "cached_tokens": 50, "expected_cached_tokens": expected, "expected_by": by}
        make_request(instance=row.name, **cached)
    html = reader.get(reverse("console:instance", args=[row.name])).content.decode()
    assert "from KV events, wrong by 0% of the prompts; estimated, wrong by 30% of the prompts" in html
