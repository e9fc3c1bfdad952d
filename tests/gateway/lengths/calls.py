"""Helpers: answers of known lengths from a gateway, and its predictions and records."""

import asyncio
from functools import partial

import orjson
from channels.db import database_sync_to_async

from controlplane.gateway.admission.validation import Call, Kind, with_prompt
from forecasting.lengths import LengthQuery

LONG = "Write a long and friendly letter to the neighbours about the summer party in our street, with the lemon cake."


async def use(lengths, predictor):
    """Replace the predictor by *predictor*; version refreshes leave it alone."""
    for task in lengths._tasks:
        task.cancel()
    lengths.answering.active.predictor = predictor


def in_database(read):
    return database_sync_to_async(read)()


async def say(served, text, tokens=None, **body):
    """Send one request whose answer has *tokens* tokens."""
    if tokens is not None:
        served.backends[0].script.tokens = tokens
    async with asyncio.timeout(30):
        response = await served.chat(messages=[{"role": "user", "content": text}], **body)
        assert response.status == 200, await response.text()
        await response.read()


async def prediction_of(served):
    """The last request's prediction, as its ledger row has it."""
    return (await served.rows())[-1].trace[0]["length"]


def asked(text):
    """Arguments of `predict` for one question."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    call = Call.read(orjson.dumps(body), Kind.CHAT, max_depth=32)
    return LengthQuery("", 5, "m", "acme", "interactive"), partial(with_prompt, call), call.prompt_characters
