"""Names that clients make up: `/metrics` and the gateway's tables do not grow with them."""

from tests.gateway.conftest import gateway_options, served, until  # noqa: F401 (fixtures)

NAMES = 40


async def series(served):  # noqa: F811
    async with served.http.get(f"{served.url}/metrics") as answer:
        return {line.rpartition(" ")[0] for line in (await answer.text()).splitlines() if not line.startswith("#")}


def asked(what, number):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    match what:
        case "model":
            return body | {"model": f"unknown-{number}"}, {}
        case "application":
            return body, {"X-Application": f"id-{number}"}
        case "run":
            return body, {"X-Application": "review", "X-Run": f"id-{number}"}
        case "session":
            return body, {"X-Session-Id": f"id-{number}"}
        case _:
            return body | {"user": f"user-{number}"}, {}


async def test_a_name_is_no_label(served):  # noqa: F811
    async def send(what, numbers):
        for number in numbers:
            body, headers = asked(what, number)
            headers["Authorization"] = f"Bearer {served.secret}"
            async with served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == (404 if what == "model" else 200)

    await until(lambda: served.gateway.dispatching.measures.relays)  # a relay reports of itself every second
    for what in ("model", "application", "run", "session", "user"):
        await send(what, range(3))
        before = await series(served)
        await send(what, range(3, NAMES))
        new = {line for line in await series(served) - before if not line.startswith("pilothouse_job")}
        assert [line for line in new if "id-" in line or "unknown-" in line or "user-" in line] == [], what
        assert len(new) < NAMES / 4, what
