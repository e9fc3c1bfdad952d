"""Paths with extra slashes, as clients send them whose base address ends in one, are answered as without them."""

import pytest

from controlplane.asgi import without_extra_slashes
from controlplane.gateway.admission.validation import PATH_KINDS
from tests.gateway.conftest import gateway_options, served  # noqa: F401 (fixtures)

PATHS = [
    *PATH_KINDS,
    "/v1/models",
    "/v1/models/team/chat",
    "/v1/files",
    "/v1/files/file-1/content",
    "/v1/batches/b/cancel",
]


@pytest.mark.parametrize("path", PATHS)
def test_slashes_that_say_nothing_are_left_out(path):
    version, *parts = path[1:].split("/")
    variants = [f"/{path}", f"{path}/", f"{path}//", f"//{path}//"]
    if version in ("v1", "v2"):
        variants += ["/".join(["", version, "", *parts]), "//".join(["", version, *parts])]
    for variant in variants:
        assert without_extra_slashes(variant) == path, variant


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1/runs//a//b/close/", "/v1/runs/a//b/close"),  # the name of a run is its own
        ("//v1/", "/v1"),
        ("/", "/"),
        ("/models/", "/models/"),  # a page of the console
        ("//models/", "//models/"),
        ("/api//models/", "/api//models/"),
        ("/v1beta//models", "/v1beta//models"),
    ],
)
def test_other_paths_stay(path, plain):
    assert without_extra_slashes(path) == plain


@pytest.mark.asyncio
async def test_a_running_gateway(served):  # noqa: F811
    from yarl import URL

    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {served.secret}"}
    for path in ("//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "/v1/chat//completions//"):
        async with served.http.post(URL(f"{served.url}{path}", encoded=True), json=body, headers=headers) as answer:
            assert answer.status == 200, (path, await answer.text())
    for path in ("//v1/models", "/v1//models/", "/v1/files/", "//v1//batches"):
        async with served.http.get(URL(f"{served.url}{path}", encoded=True), headers=headers) as answer:
            assert answer.status == 200, (path, await answer.text())
    async with served.http.get(URL(f"{served.url}//v1/models//", encoded=True)) as answer:
        assert answer.status == 401
