"""Another model than was asked for, and models that a key may not ask for, over HTTP: answers, headers, ledger, budgets."""

from collections import Counter

import pytest
import pytest_asyncio
from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Budget
from controlplane.fleet.inventory.services import share
from controlplane.fleet.models import Adapter, Deployment, Instance, Model
from controlplane.gateway.targets import comparisons
from tests.gateway.backend import Backend
from tests.gateway.conftest import until
from tests.gateway.rows import make_model


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 1}


@pytest_asyncio.fixture
async def two(served):
    """A gateway with the models m and n, on an instance each."""
    other = Backend("n-0")
    other.script.models = ("n",)
    await other.start()
    await database_sync_to_async(make_model)("n", other.url)
    await served.gateway.dispatching.read_inventory()
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
    served.backends.append(other)
    yield served
    await other.stop()


async def set_up(served, change):
    await database_sync_to_async(change)()
    await served.gateway.keys.refresh()
    await served.gateway.dispatching.allowances.refresh()
    await served.gateway.dispatching.read_inventory()


def fall_back(wait_s=None):
    Model.objects.filter(name="m").update(fallback=Model.objects.get(name="n"), fallback_wait_s=wait_s)


async def asked(served, headers=None, **body):
    async with await served.chat(headers, **body) as response:
        return response.status, response.headers.get("x-served-model"), await response.json()


async def listed(served):
    async with served.http.get(f"{served.url}/v1/models", headers=served.headers) as response:
        return [card["id"] for card in (await response.json())["data"]]


# Allowed models


async def test_a_key_asks_for_the_models_that_it_may(two):
    def allow():
        Deployment.objects.update(max_loras=1)
        for name in ("sql", "poet"):
            Adapter.objects.create(name=name, base=Model.objects.get(name="n"), source="acme/x")
        ApiKey.objects.update(allowed_models=["n", "sql"])

    await set_up(two, allow)
    assert await listed(two) == ["n", "sql"]
    assert (await asked(two, model="n"))[0] == 200
    for name in ("m", "poet"):
        status, _, answer = await asked(two, model=name)
        error = answer["error"]
        assert (status, error["code"], error["type"], error["param"]) == (
            403, "model_not_found", "invalid_request_error", "model",
        )  # fmt: skip
        assert name in error["message"]
        async with two.http.get(f"{two.url}/v1/models/{name}", headers=two.headers) as response:
            assert response.status == 404
    assert (await asked(two, model="nothing"))[0] == 403  # a key learns nothing of other names
    await set_up(two, lambda: ApiKey.objects.update(allowed_models=[]))
    assert await listed(two) == ["m", "n", "poet", "sql"]
    assert (await asked(two, model="nothing"))[0] == 404


# Weighted targets


async def test_conversations_are_shared_by_weight_and_stay_with_their_target(two):
    await set_up(two, lambda: share("chat", {"m": 50, "n": 50}, "test"))
    assert await listed(two) == ["chat", "m", "n"]
    served = Counter()
    for number in range(12):
        messages = [{"role": "user", "content": f"question {number}"}]
        status, first, answer = await asked(two, model="chat", messages=messages)
        assert (status, answer["model"]) == (200, first)
        messages += [{"role": "assistant", "content": "tok"}, {"role": "user", "content": "and then?"}]
        assert (await asked(two, model="chat", messages=messages))[1] == first
        served[first] += 1
    assert set(served) == {"m", "n"}
    assert sum(backend.bodies[-1]["model"] == backend.name[0] for backend in two.backends) == 2
    row = (await two.rows())[-1]
    assert (row.asked_model, row.model_rule, row.model) == ("chat", "weights", first)
    assert row.trace[0] == {
        "model_rule": "weights", "model": first, "asked": "chat",
        "why": f"chat has weighted targets; this conversation is served by {first}.",
    } | {name: row.trace[0][name] for name in ("length",) if name in row.trace[0]}  # fmt: skip
    counts = {(name, name, "weights"): 2 * count for name, count in served.items()}
    assert two.gateway.dispatching.measures.other_models == {("chat", *key[1:]): count for key, count in counts.items()}
    compared = await database_sync_to_async(comparisons)(timezone.now())
    assert {one.target: one.requests for one in compared} == {name: 2 * count for name, count in served.items()}


async def test_a_session_stays_whatever_it_says(two):
    await set_up(two, lambda: share("chat", {"m": 50, "n": 50}, "test"))
    for number in range(6):
        sessions = {"x-session-id": f"session-{number}"}
        said = {
            (await asked(two, sessions, model="chat", messages=[{"role": "user", "content": text}]))[1]
            for text in "abcd"
        }
        assert len(said) == 1


async def test_a_name_of_a_model_may_be_shared_with_an_adapter(two):
    def canary():
        Deployment.objects.update(max_loras=1)
        Adapter.objects.create(name="sql", base=Model.objects.get(name="m"), source="acme/sql")
        Deployment.objects.filter(model__name="m").update(max_loras=1)
        share("m", {"sql": 1}, "test")

    await set_up(two, canary)
    assert (await asked(two))[:2] == (200, "sql")
    row = await two.new_row()
    assert (row.model, row.adapter, row.asked_model) == ("m", "sql", "m")


# Fallback


async def test_a_model_without_an_instance_that_serves_falls_back(two):
    def down():
        fall_back()
        Instance.objects.filter(name="m-0").update(state="draining")
        Budget.objects.create(model="n", kind="requests_per_minute", hard=99)

    await set_up(two, down)
    status, served, answer = await asked(two)
    assert (status, served, answer["model"]) == (200, "n", "n")
    row = await two.new_row()
    assert (row.model, row.asked_model, row.model_rule, row.outcome, row.attempts) == (
        "n",
        "m",
        "unavailable",
        "done",
        1,
    )
    assert row.trace[0]["why"] == "Served by n, the fallback of m: no instance of that takes it now."
    (use,) = two.gateway.dispatching.allowances.budgets.uses.values()
    assert use.used(two.gateway.clock(), 0.0) == 1  # counted where it was served
    assert two.gateway.dispatching.topology.endpoint("m", "east").demand  # so that an instance is started for it
    await set_up(two, lambda: ApiKey.objects.update(allowed_models=["m"]))
    status, _, answer = await asked(two)  # its key may not use the fallback
    assert (status, answer["error"]["code"]) == (503, "model_unavailable")


@pytest.mark.parametrize("script", [{"status": 500}, {"die": "at_once"}])
async def test_one_that_fails_before_its_first_token_falls_back(two, script):
    await set_up(two, fall_back)
    for name, value in script.items():
        setattr(two.backends[0].script, name, value)
    assert (await asked(two))[:2] == (200, "n")
    row = await two.new_row()
    assert (row.model, row.model_rule, row.outcome) == ("n", "failure", "done")
    assert "lost" in row.trace[0]
    assert row.trace[1]["why"] == "Served by n, the fallback of m: that failed it before its first token."


async def test_a_stream_that_has_begun_does_not_fall_back(two):
    await set_up(two, fall_back)
    two.backends[0].script.die = "midway"
    async with await two.chat(stream=True) as response:
        body = await response.text()
    assert "upstream_interrupted" in body
    row = await two.new_row()
    assert (row.model, row.asked_model, row.outcome) == ("m", "", "failed")
