"""Models that share GPUs: who is awake, and a swap from the page of the instances."""

import pytest
from playwright.sync_api import expect

from controlplane.fleet.models import Instance, Swap
from tests.e2e.conftest import keep

AWAKE, ASLEEP = "llama-3-2-3b-us-west-2", "llama-3-1-8b-us-west-3"
"""The demo's swap group."""


@pytest.fixture
def shared(console):
    asleep = Instance.objects.filter(name=ASLEEP)
    before = asleep.values("state").get()
    asleep.update(state="sleeping", sleep_level=1)
    yield console
    asleep.update(**before, sleep_level=None)


@pytest.mark.gate
def test_an_operator_swaps_knowing_what_it_takes(shared, open_page):
    page = open_page(shared, "/fleet/")
    panel = page.get_by_role("region", name="Shared GPUs")
    expect(panel.get_by_role("row", name=ASLEEP)).to_contain_text("CPU memory")
    keep(page, "shared-gpus")
    panel.get_by_role("button", name="Swap to").click()
    dialog = page.get_by_role("dialog", name=f"Swap to {ASLEEP}?")
    expect(dialog).to_contain_text(f"{AWAKE} finishes what it runs")
    keep(page, "shared-gpus-dialog")
    dialog.get_by_label("Reason").fill("the evening's model")
    dialog.get_by_role("button", name="Swap", exact=True).click()
    expect(panel).to_contain_text(f"Swaps to {ASLEEP}")
    assert Swap.objects.get().reason == "the evening's model"
    expect(panel.get_by_role("button", name="Swap to")).to_have_count(0)
