"""What goes wrong in the middle: a rollout to a version that fails, and a key that is revoked with work of every kind."""

import asyncio
import contextlib
import io
import json
import time
import uuid
from datetime import datetime
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from tests.bench._soak.mix import WAITS_S, Mix, topic
from tests.bench._soak.seen import Seen
from tests.bench._soak.stack import Stack

ROLLED_MODEL, ROLLED_REGION, NEW_SEQS = "llama-3.1-8b", "us-east", 13
FAULT = {"kind": "errors", "ratio": 0.7}
BAKE_S = 60
ROLLOUT_ENDS_WITHIN_S = 400.0
KEY_MODEL = "llama-2-70b"  # its answers of `LONG` tokens take half a minute
LONG, STREAMS, WAITING, LINES = 900, 8, 120, 60
OPEN_WITHIN_S = 90.0
BATCH_ENDS_WITHIN_S = 60.0
INSTANCES = (
    "SELECT i.id, i.name, i.state, CAST(i.launched_with ->> 'max_num_seqs' AS integer) AS seqs FROM fleet_instance i "
    "WHERE i.deployment_id = ?"
)
DEPLOYMENT = (
    "SELECT d.id FROM fleet_deployment d JOIN fleet_model m ON m.id = d.model_id JOIN fleet_region r ON r.id = d.region_id "
    "WHERE m.name = ? AND r.name = ?"
)
DRAINED = (
    "SELECT DISTINCT subject_id AS id FROM events_event WHERE actor = 'rollout' AND kind = 'instance.moved' "
    "AND after ->> 'state' = 'draining'"
)


async def bad_rollout(stack: Stack, session: aiohttp.ClientSession) -> dict[str, Any]:
    """Roll out a version whose servers fail; return how it ended, and how many of the old instances it drained."""
    deployment = (await asyncio.to_thread(stack.rows, DEPLOYMENT, ROLLED_MODEL, ROLLED_REGION))[0]["id"]
    old = {str(row["id"]) for row in await asyncio.to_thread(stack.rows, INSTANCES, deployment) if row["seqs"]}
    began_s, injured = time.monotonic(), set[str]()
    url = f"{stack.url}/api/deployments/{deployment}"
    async with session.get(f"{stack.url}/api/deployments") as response:
        row = next(row for row in (await response.json())["items"] if row["id"] == deployment)
    key = {name: row[name] for name in ("model", "region", "gpu_type")}
    change = {"deployments": [key | {"max_num_seqs": NEW_SEQS}], "reason": "soak"}
    async with session.patch(f"{stack.url}/api/inventory", json=change) as response:
        assert response.status == 200, await response.text()
    begin = {"reason": "a version that fails", "bake_s": BAKE_S}
    async with session.post(f"{url}/roll-out", json=begin) as response:
        assert response.status == 200, await response.text()
    rollout: dict[str, Any] = {}
    while rollout.get("ended_at") is None and time.monotonic() < began_s + ROLLOUT_ENDS_WITHIN_S:
        for row in await asyncio.to_thread(stack.rows, INSTANCES, deployment):
            if row["seqs"] == NEW_SEQS and row["state"] in ("loading", "ready") and row["name"] not in injured:
                fault = f"http://127.0.0.1:{stack.emulator_port}/emulator/instances/{row['name']}/fault"
                async with session.post(fault, json=FAULT) as response:
                    injured |= {row["name"]} if response.status == 200 else set()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/rollout") as response:
                rollout = (await response.json())["rollout"]
        await asyncio.sleep(0.3)
    drained = {row["id"] for row in await asyncio.to_thread(stack.rows, DRAINED)}
    return {
        "state": rollout["state"],
        "cause": rollout["cause"],
        "took_s": time.monotonic() - began_s,
        "new_instances": len(injured),
        "old_instances": len(old),
        "old_lost": len(drained & old),
    }


async def revoked_key(stack: Stack, session: aiohttp.ClientSession, clients: Mix) -> dict[str, Any]:
    """Revoke a key whose streams are open, requests wait and batch runs; return what was open, and when it ended."""
    named = {"tenant": "acme", "name": "revoked in the middle"}
    async with session.post(f"{stack.url}/api/keys", json=named) as response:
        assert response.status == 201, await response.text()
        key = await response.json()
    api: dict[str, Any] = {"base_url": f"{stack.url}/v1", "max_retries": 0, "timeout": WAITS_S}
    async with (
        AsyncOpenAI(api_key=key["secret"], **api) as client,
        AsyncOpenAI(api_key=clients.keys["acme"], **api) as other,
    ):
        batch = await _batch(client, clients)
        sent: list[Seen] = []
        classes = ["interactive"] * STREAMS + ["opportunistic"] * WAITING
        tasks = [asyncio.create_task(_long(client, clients, sent, name)) for name in classes]
        was_open = await _wait_until_open(stack, session, sent, batch)
        was_open["unanswered"] = sum(not task.done() for task in tasks)
        end = {"revoked": True, "reason": "soak"}
        async with session.patch(f"{stack.url}/api/keys/{key['id']}", json=end) as response:
            assert response.status == 200, await response.text()
            revoked_at = datetime.fromisoformat((await response.json())["revoked_at"]).timestamp()
        await asyncio.wait(tasks, timeout=WAITS_S)
        after = [one.ended_at - revoked_at for one in sent if one.ended_at > revoked_at or not one.ended_at]
        clients.seen += sent
        late = Seen("soak-late", "key after its end", frozenset({401}))
        await _ask(client, clients, late, "interactive")
        status, ended_s, lines = await _end_of(other, batch)
    return {
        "open": was_open,
        "ended_by_its_rule": sum(one.code == "invalid_api_key" for one in sent),
        "longest_s": max(after, default=0.0),
        "later_than_2_s": sum(not 0 < each <= 2.0 for each in after),
        "refused_afterwards": f"{late.status} {late.code}",
        "batch": status,
        "batch_cancelled_after_s": ended_s and ended_s - revoked_at,
        "batch_lines_without_answer": LINES - lines,
    }


async def _long(client: AsyncOpenAI, clients: Mix, sent: list[Seen], slo_class: str) -> None:
    seen = Seen(f"soak-{uuid.uuid4().hex[:12]}", f"revoked key, {slo_class}", frozenset({200, 401}), key_ends=True)
    sent.append(seen)
    await _ask(client, clients, seen, slo_class, stream=slo_class == "interactive")
    seen.attempts = 1


async def _ask(client: AsyncOpenAI, clients: Mix, seen: Seen, slo_class: str, *, stream: bool = False) -> None:
    seen.model, seen.slo_class = KEY_MODEL, slo_class
    headers = {"X-Request-Id": seen.request_id, "X-SLO-Class": slo_class}
    body: dict[str, Any] = {"model": KEY_MODEL, "messages": topic(clients), "max_tokens": LONG}
    body |= {"extra_headers": headers, "extra_body": {"ignore_eos": True}}
    try:
        answer = await client.chat.completions.create(**body, stream=stream)
        if stream:
            async for _ in answer:
                seen.status = 200  # begun
        seen.done(None if stream else answer.usage)
    except Exception as error:
        seen.failed(error)
    seen.ended_at = time.time()


async def _batch(client: AsyncOpenAI, clients: Mix) -> str:
    body = {"model": KEY_MODEL, "messages": topic(clients), "max_tokens": LONG, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    text = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(LINES))
    file = await client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
    made = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


async def _wait_until_open(
    stack: Stack, session: aiohttp.ClientSession, sent: list[Seen], batch: str
) -> dict[str, Any]:
    """Return what is open once every stream has begun, requests wait and the batch runs, or the time is over."""
    was_open: dict[str, Any] = {}
    deadline_s = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
        async with session.get(f"{stack.url}/api/summary") as response:
            tile = (await response.json())["models"][KEY_MODEL]
        status = await asyncio.to_thread(stack.rows, "SELECT status FROM batches_batch WHERE public_id = ?", batch)
        streams = sum(one.status == 200 and not one.ended_at for one in sent)
        was_open = {"streams": streams, "waiting": tile["waiting"], "held": tile["held"], "batch": status[0]["status"]}
        waits = tile["waiting"] + tile["held"]
        if streams == STREAMS and waits and was_open["batch"] == "in_progress":
            break
    return was_open


async def _end_of(client: AsyncOpenAI, batch: str) -> tuple[str, float | None, int]:
    """Return the last status of *batch*, when it was cancelled, and the number of its answered lines."""
    deadline_s, lines = time.monotonic() + BATCH_ENDS_WITHIN_S, 0
    while (made := await client.batches.retrieve(batch)).status not in ("cancelled", "completed", "failed"):
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.5)
    for file in filter(None, (made.output_file_id, made.error_file_id)):
        lines += len((await client.files.content(file)).text.splitlines())
    return made.status, made.cancelling_at or made.cancelled_at, lines
