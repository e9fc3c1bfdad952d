"""The console on a screen of 390 pixels."""

from tests.e2e import seed
from tests.e2e.conftest import PHONE, TABLET, cut


def test_on_a_phone_tables_are_cards(console, open_page):
    page = open_page(console, "/fleet/", viewport=PHONE)
    card = page.locator(f'#instances-panel tr[data-row]:has-text("{seed.DRAINED}")').first
    cell = card.locator("td[data-fragment$='kv_ratio:percent']")
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"KV cache"'
    title, cell_box, row = (each.bounding_box() for each in (card.locator("th"), cell, card))
    assert cell_box["y"] > title["y"]  # below its title
    assert row["width"] < PHONE["width"]
    assert not page.locator(".scroll").evaluate_all("all => all.some(one => one.scrollWidth > one.clientWidth)")
    page.get_by_role("link", name="KV cache").click()  # what sorts is still there
    page.wait_for_url("**/fleet/?sort=-kv_ratio")
    page.set_viewport_size({"width": 1440, "height": 900})
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == "none"
    # Between a phone and a desk columns leave, words break, and no table is cut.
    for path in ("/fleet/", "/", "/models/", "/requests/", "/settings/", "/events/", "/keys/", "/alerts/"):
        page.goto(path)
        for width in (700, TABLET["width"], 1024, 1280):
            assert cut(page, {"width": width, "height": 900}) == [], (path, width)


def test_what_is_wider_than_its_panel_says_so(furnished, open_page):
    """The matrix of regions: a shadow at the edge behind which there is more, and none where all is seen."""
    page = open_page(furnished, "/scaling/", viewport={"width": 700, "height": 900}, theme="light")
    region = page.get_by_role("region", name="Present and planned instances, table")
    assert cut(page, {"width": 700, "height": 900})
    edges = []
    for at in (0, 10_000):
        region.evaluate("(one, at) => { one.scrollLeft = at }", at)
        page.wait_for_timeout(100)
        box = region.bounding_box()
        strip = {"y": box["y"] + 4, "width": 6, "height": 20}
        left, right = box["x"] + 1, box["x"] + box["width"] - 7
        edges.append([page.screenshot(clip=strip | {"x": x}) for x in (left, right)])
    (left, shaded), (shaded_left, right) = edges
    assert left != shaded_left
    assert right != shaded
