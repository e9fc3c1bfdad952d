"""A batch alongside interactive load on the emulated fleet, against the same load without: its price, and what it fills.

The whole stack with its demo traffic, at one hour of its day, so that the load is the same in both parts.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from tests.bench._soak.stack import Stack

ENDPOINT = "/v1/chat/completions"
MODELS = ("llama-3.2-3b", "llama-3.1-8b")
STANDS_STILL_S = 7 * 24 * 3600.0  # a day of the traffic: longer than any measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--settle-s", type=float, default=60.0, help="before the first part")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the part without a batch")
    parser.add_argument("--most-minutes", type=float, default=60.0, help="of the part with it")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilothouse-batch-") as folder:
        stack = Stack(Path(folder), day_s=STANDS_STILL_S)
        try:
            link = stack.wait_until_up()
            stack.wait_for("the sign-in page", lambda: stack.sign_in(link) or True)
            key = stack.keys("globex")["globex"]
            time.sleep(options.settle_s)
            before = watch(stack, lambda: False, options.minutes * 60)
            client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=10)
            batch = start(client, options)

            def ended() -> bool:
                with contextlib.suppress(openai.APIError):
                    return client.batches.retrieve(batch.id).status in ("completed", "failed", "expired")
                return False

            after = watch(stack, ended, options.most_minutes * 60)
            batch = client.batches.retrieve(batch.id)
            answers = client.files.content(batch.output_file_id).text.splitlines() if batch.output_file_id else []
            ids = [json.loads(line)["custom_id"] for line in answers]
            return {
                "interactive_ttft_p95_ratio": after["ttft_p95_ms"] / before["ttft_p95_ms"],
                "interactive_ttft_p95_ms": [before["ttft_p95_ms"], after["ttft_p95_ms"]],
                "interactive_requests": [before["requests"], after["requests"]],
                "lines_answered_once": len(set(ids)) if len(ids) == len(set(ids)) else -1,
                "fleet_use_before": before["use"],
                "fleet_use_after": after["use"],
                "deadline_met": float(batch.status == "completed"),
                "lines_per_s": len(ids) / after["seconds"],
                "rss_growth_mb": after["rss_mb"] - before["rss_mb"],
            }
        finally:
            stack.interrupt()
            stack.kill()


def start(client: openai.OpenAI, options: argparse.Namespace) -> Any:
    lines = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": MODELS[number % len(MODELS)],
                "messages": [{"role": "user", "content": f"Write a line about the number {number}."}],
                "max_tokens": options.tokens,
            },
        }
        for number in range(options.lines)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("bench.jsonl", io.BytesIO(content)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def watch(stack: Stack, ended: Any, most_s: float) -> dict[str, float]:
    """Watch until *ended* or *most_s*. Return mean use of the fleet (of sequences or of KV memory, the fuller one), TTFT
    of interactive requests, and memory of the web process.
    """
    began_at, uses, sizes = time.time(), [], []
    while time.time() < began_at + most_s and not ended():
        time.sleep(1.0)
        with contextlib.suppress(OSError):  # a busy machine answers late: one sample less
            uses.append(statistics.mean(value or 0.0 for value in stack.summary(stack.url)["instances"]["use_ratio"]))
        sizes.append(sum(stack.by_part().get("web", {}).values()) / 2**20)
    rows = stack.rows(
        "SELECT ttft_ms FROM gateway_ledgerrow WHERE slo_class = 'interactive' AND ttft_ms IS NOT NULL"
        " AND strftime('%s', arrived_at) + 0 >= ?",
        int(began_at),
    )
    times = sorted(row["ttft_ms"] for row in rows)
    return {
        "seconds": time.time() - began_at,
        "use": statistics.mean(uses),
        "ttft_p95_ms": times[int(0.95 * len(times))],
        "requests": float(len(times)),
        "rss_mb": statistics.median(sizes[-10:]),
    }
