"""Every page opens, is drawn, and the browser complains of nothing: no error of a script, no look-up that fails. What it
shows has one form: of percent, signs, rates and names."""

import re

import pytest
from playwright.sync_api import expect

from tests.e2e.test_accessibility import PAGES, PLANNING, address

OTHER_FORMS = re.compile(
    r"\d\s%"  # 97.7%
    r"|(?<![\w.])-\$?\d[\d.,]*(?![\w-])"  # a true minus
    r"|\d x [A-Z]"  # a true multiplication sign
    r"|\d tokens/s"  # tok/s
)
FURTHER = ("/models/deploy/", "/queues/", "/what-if/", "/what-if/new?start=fleet")


@pytest.mark.gate
def test_every_page_opens_without_a_complaint(furnished, open_page, complaints):
    page = open_page(furnished, "/events/")
    paths = [address(name) for name in (*PAGES, *PLANNING) if name != "not-violated"]
    for path in (*paths, *FURTHER):
        answer = page.goto(path)
        assert answer.status == 200, path
        expect(page.locator("h1").first).to_be_visible()
        if page.locator("[data-plot]").count():
            page.locator("[data-plot]").first.scroll_into_view_if_needed()  # charts are drawn where they are looked at
            expect(page.locator("[data-plot] .main-svg").first).to_be_visible()
        assert complaints.unexpected() == [], path
        shown = page.locator("main").inner_text()
        others = [
            (match[0], shown[max(0, match.start() - 40) : match.end() + 20]) for match in OTHER_FORMS.finditer(shown)
        ]
        assert others == [], path
