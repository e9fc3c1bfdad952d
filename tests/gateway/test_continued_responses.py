"""Conversations that continue by `previous_response_id`: each at the instance that keeps its responses."""

import asyncio
from typing import Any

import openai
import pytest
import pytest_asyncio
from channels.db import database_sync_to_async
from django.conf import settings
from msgspec.structs import replace

from controlplane.fleet.models import Instance
from tests.gateway.conftest import ServedGateway, do_once, emulate_two, gateway_before, open_sdk, until
from tests.gateway.rows import make_model
from tests.workers.conftest import emulator  # noqa: F401 (a fixture)

OF_MANY = {"max_num_seqs": 1, "store_responses": True, "output_median_tokens": 12}
GONE = (404, "previous_response_not_found", "previous_response_id")


@pytest_asyncio.fixture
async def pair(transactional_db, monkeypatch, emulator):  # noqa: F811
    """A gateway with two instances that store responses, each of which runs one request at a time."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    do_once(monkeypatch)
    instances, backends = await emulate_two(emulator, ["east", "east"], **OF_MANY)
    third = await emulator.ready("c", model="e")
    await database_sync_to_async(make_model)("e", f"{emulator.url}/{third.name}", context_tokens=1024)
    async with gateway_before([*backends, third], instances=instances) as served:
        yield served


@pytest_asyncio.fixture
async def client(pair):
    async with open_sdk(pair, max_retries=0) as sdk:
        yield sdk


def error_of(error: openai.APIStatusError) -> tuple[Any, ...]:
    return error.status_code, error.code, error.param


async def say(client: openai.AsyncOpenAI, text: str, before: str | None = None, **more: Any) -> Any:
    given = {"model": "m", "max_output_tokens": 4, "temperature": 0, **more}
    return await client.responses.create(input=text, previous_response_id=before, **given)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_continues_at_the_instance_that_has_it(pair: ServedGateway, client, stream):
    made = await asyncio.gather(*(say(client, f"Watch {at}.", instructions="Be brief.") for at in range(4)))
    where = [next(one.name for one in pair.extra["instances"] if each.id in one.responses) for each in made]
    assert set(where) == {"a", "b"}
    for at in (2, 0, 3, 1):
        again = await say(client, "Go on.", made[at].id, stream=stream)
        if stream:
            (again,) = [event.response async for event in again if event.type == "response.completed"]
        row = (await pair.rows())[-1]
        assert (row.outcome, row.instance) == ("done", where[at])
        assert again.previous_response_id == made[at].id
        assert "has the response" in row.trace[0]["chosen_because"]
        whole = [
            {"role": "user", "content": f"Watch {at}."},
            {"role": "assistant", "content": made[at].output_text},
            {"role": "user", "content": "Go on."},
        ]
        sent = await client.responses.create(model="m", input=whole, max_output_tokens=4, temperature=0)
        assert again.usage.input_tokens == sent.usage.input_tokens == row.prompt_tokens
        assert row.predicted_prompt_tokens > made[at].usage.total_tokens, "what is stored counts"
        third = await say(client, "And then?", again.id)
        assert third.usage.input_tokens > again.usage.total_tokens


async def test_one_that_waits_for_its_instance_holds_up_no_other(pair: ServedGateway, client):
    made = await say(client, "Hello.")
    where = (await pair.rows())[-1].instance
    long = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    busy = await say(client, "x", made.id, **long)
    waits, goes = (
        asyncio.create_task(
            client.responses.with_raw_response.create(model="m", input="y", max_output_tokens=2, **more)
        )
        for more in ({"previous_response_id": made.id}, {})
    )
    async with asyncio.timeout(20):
        await goes
    dispatcher = pair.gateway.dispatcher
    endpoint = dispatcher.topology.endpoint("m", "east")
    assert (dispatcher.waiting(endpoint), dispatcher.queue.count(endpoint)) == (1, 0)
    assert not waits.done()
    await busy.close()
    async with asyncio.timeout(20):
        assert (await waits).headers["x-queue-position"] == "1"
    assert [row.instance == where for row in await pair.rows()] == [True, False, True, True]


async def test_what_no_instance_has_is_one_clear_error(pair: ServedGateway, client):
    made = await say(client, "Hello.")
    not_stored = await say(client, "Hello.", store=False)
    stored, texts = pair.gateway.upstream.stored, set()

    async def refused(response_id: str, **more: Any) -> None:
        with pytest.raises(openai.NotFoundError) as error:
            await say(client, "Go on.", response_id, **more)
        assert error_of(error.value) == GONE
        texts.add(error.value.message.replace(response_id, "ID"))

    await refused("resp_none")
    await refused(not_stored.id)
    stored._made["other"] = replace(stored._made[made.id], tenant_id=-1)
    await refused("other")
    (instance,) = (each for each in pair.extra["instances"] if made.id in each.responses)
    kept = dict(instance.responses)
    instance.responses.clear()  # as after a restart
    await refused(made.id)
    assert len(texts) == 1, "what another tenant has looks like nothing"
    instance.responses.update(kept)
    await refused(made.id, model="e")
    assert any("made by m," in each for each in texts)
    await say(client, "Go on.", made.id)
    await database_sync_to_async(Instance.objects.filter(name=instance.name).update)(state="draining")
    await until(lambda: "draining" in {one.spec.state for one in pair.gateway.topology.replicas.values()})
    await refused(made.id)
    assert any("does not serve any longer" in each for each in texts)
    with pytest.raises(openai.BadRequestError) as wrong:
        await say(client, "Go on.", extra_body={"previous_response_id": 5})
    assert wrong.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as uncounted:
        await client.responses.input_tokens.count(model="m", input="x", previous_response_id=made.id)
    assert uncounted.value.code == "unsupported_parameter"
