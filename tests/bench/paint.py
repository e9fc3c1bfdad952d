"""First paint of the console's main pages in real Chromium, with an empty cache and with a warm one.

On a demo with traffic, started for it, or on the server of `--link` (`manage.py sign_in_link`). Times are the browser's
PerformancePaintTiming and navigation entries, in milliseconds from the start of the navigation.
"""

import argparse
import statistics
import time
from typing import Any

from tests.bench._demo import demo
from tests.e2e.console_server import chromium

PAGES = {
    "overview": "/", "fleet": "/fleet/", "models": "/models/", "deploy": "/models/deploy/", "queues": "/queues/",
    "requests": "/requests/", "model": "/models/llama-3.1-8b/", "scaling": "/scaling/", "what_ifs": "/what-if/",
    "usage": "/usage/", "keys": "/keys/", "system": "/system/", "settings": "/settings/", "timeline": "/timeline/",
    "events": "/events/", "api_docs": "/api/docs",
}  # fmt: skip
TIMES = """() => {
  const [navigation] = performance.getEntriesByType("navigation");
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return { paint_ms: paint ? paint.startTime : null, first_byte_ms: navigation.responseStart,
           transfer_kb: navigation.transferSize / 1024 };
}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", help="a sign-in link of a server that runs")
    parser.add_argument(
        "--settle", type=float, default=120.0, help="seconds from the start of a demo to the first page"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each page and cache; medians are reported")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.link:
        return painted(options.link, options.rounds)
    with demo() as stack:
        time.sleep(options.settle)
        return painted(stack.link, options.rounds)


def painted(link: str, count: int) -> dict[str, Any]:
    """Return medians of *count* rounds of each page."""
    from playwright.sync_api import sync_playwright

    url = link.partition("/sign-in/")[0]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = browser.new_context()
        page = context.new_page()
        page.goto(link)
        page.locator("form button").first.click()
        page.wait_for_url(lambda address: "sign-in" not in address)
        signed_in = context.storage_state()
        result: dict[str, Any] = {"cold": {}, "warm": {}}
        for name, path in PAGES.items():
            warm = [_times(page, f"{url}{path}") for _ in range(count + 1)][1:]
            cold = []
            for _ in range(count):
                fresh = browser.new_context(storage_state=signed_in)
                cold.append(_times(fresh.new_page(), f"{url}{path}"))
                fresh.close()
            for kind, rounds in (("cold", cold), ("warm", warm)):
                result[kind][name] = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        browser.close()
    for kind in ("cold", "warm"):
        slowest = max(result[kind], key=lambda name: result[kind][name]["paint_ms"])
        result[f"{kind}_slowest"] = slowest
        result[f"{kind}_slowest_paint_ms"] = result[kind][slowest]["paint_ms"]
    return result


def _times(page: Any, address: str) -> dict[str, float]:
    page.goto(address, wait_until="load")
    for _ in range(50):  # not wait_for_function: the pages' policy refuses to evaluate it
        times = dict(page.evaluate(TIMES))
        if times["paint_ms"] is not None:
            return times
        page.wait_for_timeout(20)
    raise RuntimeError(f"{address} painted nothing within a second")
