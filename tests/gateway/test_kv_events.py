"""The gateway follows the KV events of emulated servers, and routes by what they really have cached."""

from channels.db import database_sync_to_async

from controlplane.fleet.models import Deployment, Instance
from tests.gateway.conftest import do_once, emulate_two, gateway_before, until
from tests.workers.conftest import emulator  # noqa: F401 (fixture)

PUBLISHES = {
    "enable_prefix_caching": True,
    "enable_kv_cache_events": True,
    "enable_prompt_tokens_details": True,
    "kv_blocks": 512,
    "max_model_len": 8192,
}


async def ask(served, text: str, **body) -> None:
    async with await served.chat(messages=[{"role": "user", "content": text}], **body) as response:
        assert response.status == 200
        await response.read()


async def test_a_prompt_goes_where_it_is_cached_until_it_no_longer_is(
    emulator,  # noqa: F811
    transactional_db,
    monkeypatch,
):
    do_once(monkeypatch)
    _, backends = await emulate_two(emulator, ["east", "east"], 8, **PUBLISHES)
    await database_sync_to_async(Deployment.objects.update)(routing_policy="least_delay", kv_events=True)
    async with gateway_before(backends) as served:
        caches = served.gateway.dispatching.kv_caches.of
        await until(lambda: len(caches) == 2 and not any(cache.why for cache in caches.values()))
        await until(lambda: served.gateway.catalog._models["m"].tokenizer is not None)
        text = "a word that is said often " * 200
        await ask(served, text, max_tokens=2)
        first = await served.new_row()
        await until(lambda: sum(cache.count for cache in caches.values()) == first.prompt_tokens // 16)
        await ask(served, text, max_tokens=2, user="again")
        row = await served.new_row()
        cached = row.prompt_tokens // 16 * 16
        assert (row.trace[-1]["cached_tokens"], row.trace[-1]["cached_by"]) == (cached, "kv_events")
        assert (row.instance, row.cached_tokens, row.expected_cached_tokens) == (first.instance, cached, cached)
        assert (row.expected_by, served.gateway.upstream.tokens.failed) == ("kv_events", 0)
        rows = served.gateway.dispatching.topology.replicas.values()
        await until(lambda: sorted(one.cached_blocks or 0 for one in rows) == [0, cached // 16])
        summary = served.gateway.publisher.summary.snapshot()["instances"]
        assert sorted(summary["cached_blocks"]) == [0, cached // 16]
        assert summary["cache_unknown"] == ["", ""]
        # with an address, as of a server that cannot say it
        _, answer = await emulator.call("GET", f"/{row.instance}/kv_event_sources")
        address = f"{answer['0']['endpoint']} {answer['0']['replay_endpoint']}"
        of = {one.name: cache for one, cache in caches.items()}[row.instance]
        await database_sync_to_async(Instance.objects.filter(name=row.instance).update)(kv_events=address)
        await until(lambda: sum(cache.count for cache in caches.values()) and of not in caches.values())
        await emulator.call("POST", f"/{row.instance}/reset_prefix_cache")
        await until(lambda: all(cache.count == 0 and not cache.why for cache in caches.values()))
        await served.gateway.dispatching.read_inventory()
        for salt in ("mine", "yours"):
            await ask(served, text, max_tokens=2, cache_salt=salt)
            row = await served.new_row()
            assert (row.expected_cached_tokens, row.cached_tokens) == (0, 0)
            assert row.trace[-1]["cached_by"] == "kv_events"
