"""`/api/docs` in a browser that reaches nothing but the console, and a key with its first call in two clicks."""

import json
import re
import shlex

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import PHONE, keep


@pytest.mark.gate
def test_docs_work_offline(console, open_page):
    page = open_page(console, "/", user="tenant")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("navigation", name="Main").get_by_role("link", name="API", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("API")
    assert all(address.startswith(console.url) for address in asked)
    operation = page.locator("#create_response")
    operation.locator("summary").first.click()
    expect(operation.get_by_text("max_output_tokens", exact=True)).to_be_visible()
    keep(page, "api-docs-open")
    page.get_by_placeholder("Search operations").fill("list requests")
    expect(page.locator(".operation:visible")).to_have_count(1)
    expect(page.locator("[data-docs-count]")).to_have_text("1 shown")
    page.get_by_placeholder("Search operations").fill("nothing like it")
    expect(page.get_by_text("No match.")).to_be_visible()
    page.goto("/api/docs#list_requests")  # what the search hides is shown when its address is asked for
    expect(page.locator("#list_requests")).to_have_attribute("open", "")
    expect(page.locator("#list_requests > summary")).to_be_visible()
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    keep(page, "api-docs-phone")


def test_a_key_and_its_first_call_take_two_clicks(console, open_page):
    page = open_page(console, "/requests/", user="tenant", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("navigation", name="Main").get_by_role("link", name="API keys").click()
    page.get_by_role("button", name="Create key").click()
    curl = page.locator("#curl").text_content()
    assert page.locator("#secret").text_content() in curl
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", f"{console.url}/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["stream"] is True
    page.get_by_role("button", name=re.compile("the curl")).click()
    expect(page.get_by_role("button", name=re.compile("the curl"))).to_contain_text("Copied")
    keep(page, "key-created")
