"""Other requests of OpenAI and vLLM clients: health, versions, unknown paths, other origins."""

import asyncio

import pytest
from django.conf import settings

from tests.gateway.conftest import until


async def test_health_and_version_without_a_key(served):
    """C10."""
    for path in ("/health", "/v1/health", "/ping", "/healthz"):
        for method in ("GET", "HEAD", "POST"):
            async with served.http.request(method, served.url + path) as response:
                assert response.status == 200, (method, path)
    async with served.http.get(f"{served.url}/version") as response:
        assert (await response.json())["version"]
    served.gateway.stopping = True
    async with served.http.get(f"{served.url}/health") as response:
        assert response.status == 503
    served.gateway.stopping = False


MISSING = [
    ("GET", "/v1"), ("POST", "/v1/"), ("POST", "/v1/v2/embed"), ("POST", "/cohere/v2/chat"), ("POST", "/v1/systemone"),
    ("GET", "/tokenizer_info"), ("POST", "/v3/rerank"), ("GET", "/server_info"), ("POST", "/v1/images/generations"),
    ("POST", "/v1/moderations"), ("POST", "/embeddings"), ("POST", "/chat/completions"),
    ("POST", "/v1/v1/chat/completions"), ("GET", "/models/none"),
    ("POST", "/v1/responses/compact"), ("POST", "/inference/v1/generate"), ("POST", "/v1/audio/speech"),
]  # fmt: skip


async def test_missing_parts_of_the_api_are_reported_in_openai_shape(served, subtests):
    for method, path in MISSING:
        with subtests.test(method=method, path=path):
            async with served.http.request(method, served.url + path, json={}, headers=served.headers) as response:
                assert response.status == 404
                assert response.content_type == "application/json"
                error = (await response.json())["error"]
            assert "/v1/chat/completions" in error["message"]
            assert response.headers["x-should-retry"] == "false"


async def test_load_is_that_of_the_tenant(served):
    async with served.http.get(f"{served.url}/load") as response:
        assert response.status == 401
    served.backends[0].script.hold = asyncio.Event()
    asking = asyncio.create_task(served.chat())
    await until(lambda: served.backends[0].running)
    loads = []
    for _ in range(2):
        async with served.http.get(f"{served.url}/load", headers=served.headers) as response:
            loads.append(await response.json())
        served.backends[0].script.hold.set()
        await (await asking).read()
    assert loads == [{"server_load": 1}, {"server_load": 0}]


async def test_models_may_be_asked_for_by_head(served):
    """E5."""
    async with served.http.head(f"{served.url}/v1/models", headers=served.headers) as response:
        assert response.status == 200
    async with served.http.head(f"{served.url}/v1/chat/completions", headers=served.headers) as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"


async def test_a_page_is_still_a_page(served):
    async with served.http.get(f"{served.url}/nowhere", headers={"Authorization": "Basic eDp5"}) as response:
        assert (response.status, response.content_type) == (404, "text/html")


PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_other_origins_are_off_by_default(served):
    async with served.http.options(f"{served.url}/v1/chat/completions", headers=PREFLIGHT) as response:
        assert response.status == 405
    async with await served.chat(headers={"Origin": "https://chat.example"}) as response:
        assert not any(name.lower().startswith("access-control") for name in response.headers)


@pytest.fixture
def origins(monkeypatch, request):
    monkeypatch.setattr(settings, "CORS_ORIGINS", request.param)


@pytest.mark.parametrize("origins", [["https://chat.example"], ["*"]], indirect=True)
async def test_an_origin_that_is_named_may_call(origins, served):
    """C12."""
    async with served.http.options(f"{served.url}/v1/chat/completions", headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    for stream in (False, True):
        async with await served.chat(stream=stream, headers={"Origin": "https://chat.example"}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == "https://chat.example"
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            await response.read()
    async with await served.chat(model=None, headers={"Origin": "https://chat.example"}) as response:
        assert (response.status, response.headers["access-control-allow-origin"]) == (400, "https://chat.example")
    async with await served.chat(headers={"Origin": "https://other.example"}) as response:
        others = settings.CORS_ORIGINS == ["*"]
        assert (response.headers.get("access-control-allow-origin") == "https://other.example") is others
        assert response.headers["vary"] == "Origin"
