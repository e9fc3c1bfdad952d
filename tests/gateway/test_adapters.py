"""LoRA adapters as models: listed, routed to where they are, loaded there first, unloaded when others need the memory."""

import asyncio

import pytest_asyncio
from channels.db import database_sync_to_async

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.fleet.models import Adapter, Deployment, Model
from controlplane.gateway.explanation import trace_of
from tests.gateway.conftest import until

ADAPTERS = ("sql", "poet", "legal", "chess")


def make_adapters(max_loras: int, max_cpu_loras: int) -> None:
    Deployment.objects.update(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    base = Model.objects.get(name="m")
    for name in ADAPTERS:
        Adapter.objects.create(name=name, base=base, source=f"acme/{name}")


@pytest_asyncio.fixture
async def adapted(served):
    await database_sync_to_async(make_adapters)(1, 2)
    await served.gateway.dispatching.read_inventory()
    return served


async def status_of(served, model, **body):
    response = await served.chat(model=model, **body)
    return response.status, await response.json()


async def test_an_adapter_is_a_model_of_the_api(adapted):
    async with adapted.http.get(f"{adapted.url}/v1/models", headers=adapted.headers) as response:
        cards = {card["id"]: (card["root"], card["parent"]) for card in (await response.json())["data"]}
    assert cards == {"m": ("m", None)} | dict.fromkeys(ADAPTERS, ("m", "m"))

    status, answer = await status_of(adapted, "sql")
    assert (status, answer["model"]) == (200, "sql")
    (backend,) = adapted.backends
    assert (backend.lora_calls, backend.bodies[-1]["model"]) == (["+sql"], "sql")
    row = await adapted.new_row()
    assert (row.model, row.outcome) == ("m", "done")  # counted, predicted and billed as its model
    assert trace_of(row)[0]["adapter"] == {"name": "sql", "was": "not loaded"}
    await status_of(adapted, "sql")
    assert (await adapted.new_row()).trace[0]["adapter_was"] == "on the GPU"
    assert backend.lora_calls == ["+sql"]


def make_other_tenants(name):
    """Another tenant with a key, whose adapter alone *name* is."""
    key = ApiKey.objects.select_related("tenant").get()
    other = Tenant.objects.create(name="globex", default_slo_class=key.tenant.default_slo_class)
    other.slo_classes.set(key.tenant.slo_classes.all())
    ApiKey.objects.create(tenant=other, name="k", prefix="ph_other", sha256=hash_secret("ph_other"))
    Adapter.objects.filter(name=name).update(tenant=other)


MESSAGE = [{"role": "user", "content": "Hello"}]
ASK = {
    "/v1/chat/completions": {"messages": MESSAGE},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGE, "max_tokens": 3},
    "/tokenize": {"messages": MESSAGE},
}
MARKS = {"X-Application": "review", "X-Run": "r", "X-Unit": "write"}


async def test_an_adapter_of_a_tenant_does_not_exist_for_others(adapted):
    """By every way to ask for it, as a call of an application too, others are answered as for a name that there is not."""
    await database_sync_to_async(make_other_tenants)("sql")
    await adapted.gateway.dispatching.read_inventory()

    async def tried(name):
        answers = []
        async with adapted.http.get(f"{adapted.url}/v1/models/{name}", headers=adapted.headers) as response:
            answers.append((response.status, await response.text()))
        for path, body in ASK.items():
            headers = adapted.headers | MARKS
            async with adapted.http.post(
                f"{adapted.url}{path}", headers=headers, json={"model": name} | body
            ) as response:
                answers.append((response.status, await response.text()))
        return [(status, text.replace(name, "NAME")) for status, text in answers]

    async def listed():
        async with adapted.http.get(f"{adapted.url}/v1/models", headers=adapted.headers) as response:
            return [card["id"] for card in (await response.json())["data"]]

    of_other = await tried("sql")
    assert of_other == await tried("nothing")
    assert {status for status, _ in of_other} == {404}
    assert all("model_not_found" in text or "not_found_error" in text for _, text in of_other)
    assert await listed() == ["chess", "legal", "m", "poet"]
    assert await adapted.rows() == []
    adapted.secret = "ph_other"
    assert await listed() == ["chess", "legal", "m", "poet", "sql"]
    assert (await status_of(adapted, "sql"))[0] == 200
    assert (await status_of(adapted, "poet"))[0] == 200


async def test_the_least_recently_used_adapter_is_unloaded(adapted):
    for name in ("sql", "poet", "sql", "legal", "poet"):
        assert (await status_of(adapted, name))[0] == 200
    (backend,) = adapted.backends
    await until(lambda: backend.lora_calls.count("-sql") == 1)
    calls = backend.lora_calls
    assert sorted(calls) == sorted(["+sql", "+poet", "+legal", "-poet", "+poet", "-sql"])
    assert sorted(backend.adapters) == ["legal", "poet"]
    assert calls.index("-poet") < len(calls) - 1 - calls[::-1].index("+poet")


async def test_calls_of_one_adapter_wait_for_one_load(adapted):
    (backend,) = adapted.backends
    backend.script.lora_s = 0.2
    statuses = await asyncio.gather(*(status_of(adapted, "sql") for _ in range(4)))
    assert [status for status, _ in statuses] == [200] * 4
    assert backend.lora_calls == ["+sql"]


async def test_an_adapter_in_use_keeps_its_place_on_the_gpu(adapted):
    """With one slot on the GPU, a second adapter waits until the first is not in use; the base model does not."""
    (backend,) = adapted.backends
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(status_of(adapted, "sql"))
    await until(lambda: backend.running == 1)
    second, plain = (asyncio.create_task(status_of(adapted, name)) for name in ("poet", "sql"))
    await asyncio.sleep(0.1)
    assert backend.lora_calls == ["+sql"]
    backend.script.hold.set()
    assert [status for status, _ in await asyncio.gather(first, second, plain)] == [200] * 3
    assert backend.lora_calls == ["+sql", "+poet"]


async def test_one_that_cannot_be_loaded_is_unavailable(adapted):
    (backend,) = adapted.backends
    backend.script.lora_status = 404
    status, answer = await status_of(adapted, "sql")
    assert (status, answer["error"]["code"]) == (503, "adapter_unavailable")
    assert "No adapter found" in answer["error"]["message"]
    row = await adapted.new_row()
    assert (row.error_code, row.status_code) == ("adapter_unavailable", 503)
    assert not adapted.gateway.dispatching.topology.fleet.adapters.any()
    backend.script.lora_status = 200
    assert (await status_of(adapted, "sql"))[0] == 200


async def test_one_that_the_server_has_lost_is_loaded_again(adapted):
    (backend,) = adapted.backends
    assert (await status_of(adapted, "sql"))[0] == 200
    backend.adapters.clear()
    assert (await status_of(adapted, "sql"))[0] == 200
    assert backend.lora_calls == ["+sql", "+sql"]


async def test_none_is_served_where_servers_were_started_without(adapted):
    def without():
        Deployment.objects.update(max_loras=0, max_cpu_loras=0)

    await database_sync_to_async(without)()
    await adapted.gateway.dispatching.read_inventory()
    status, answer = await status_of(adapted, "sql")
    assert (status, answer["error"]["code"]) == (503, "adapters_unavailable")
    assert (await status_of(adapted, "m"))[0] == 200
    assert (await status_of(adapted, "nothing"))[0] == 404


async def test_adapters_of_waiting_requests_are_loaded_meanwhile(adapted):
    """One slot for requests: what waits is loaded meanwhile, and finds its adapter on the GPU."""
    (backend,) = adapted.backends
    await database_sync_to_async(Deployment.objects.update)(max_loras=2, max_cpu_loras=3, max_num_seqs=1)
    await adapted.gateway.dispatching.read_inventory()
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(status_of(adapted, "sql"))
    await until(lambda: backend.running == 1)
    second = asyncio.create_task(status_of(adapted, "poet"))
    await until(lambda: len(adapted.gateway.dispatching.dispatcher.queue) == 1)
    adapted.gateway.dispatching.dispatcher.prewarming.sweep()
    await until(lambda: backend.lora_calls == ["+sql", "+poet"])
    backend.script.hold.set()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200] * 2
    rows = {row.adapter: row.trace[0]["adapter_was"] for row in await adapted.rows()}
    assert rows == {"sql": "not loaded", "poet": "on the GPU"}
    counts = adapted.gateway.dispatching.dispatcher.prewarming.counts["adapter"]
    assert (counts["warmed"], counts["used"], counts["wasted"]) == (1, 1, 0)


async def test_one_that_cannot_be_prewarmed_is_tried_again_by_its_request(adapted):
    (backend,) = adapted.backends
    await database_sync_to_async(Deployment.objects.update)(max_loras=2, max_cpu_loras=3, max_num_seqs=1)
    await adapted.gateway.dispatching.read_inventory()
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(status_of(adapted, "m"))
    await until(lambda: backend.running == 1)
    second = asyncio.create_task(status_of(adapted, "poet"))
    await until(lambda: len(adapted.gateway.dispatching.dispatcher.queue) == 1)
    backend.script.lora_status = 500
    adapted.gateway.dispatching.dispatcher.prewarming.sweep()
    await asyncio.sleep(0.2)
    backend.script.lora_status = 200
    backend.script.hold.set()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200] * 2
    assert backend.lora_calls == ["+poet"]
