"""The console on a screen of 390 pixels."""

from tests.e2e import seed
from tests.e2e.conftest import PHONE, TABLET, cut


def test_on_a_phone_tables_are_cards(console, open_page):
    page = open_page(console, "/instances/", viewport=PHONE)
    card = page.locator(f'#instances-panel tr[data-row]:has-text("{seed.DRAINED}")').first
    cell = card.locator("td[data-fragment$='kv_ratio:percent']")
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"KV cache"'
    title, cell_box, row = (each.bounding_box() for each in (card.locator("th"), cell, card))
    assert cell_box["y"] > title["y"]  # below its title
    assert row["width"] < PHONE["width"]
    assert not page.locator(".scroll").evaluate_all("all => all.some(one => one.scrollWidth > one.clientWidth)")
    page.get_by_role("link", name="KV cache").click()  # what sorts is still there
    page.wait_for_url("**/instances/?sort=-kv_ratio")
    page.set_viewport_size({"width": 1440, "height": 900})
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == "none"
    for path in ("/instances/", "/", "/models/"):  # between a phone and a desk columns leave, and no table is cut
        page.goto(path)
        assert cut(page, TABLET) == [], path
