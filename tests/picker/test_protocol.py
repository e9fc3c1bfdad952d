"""What a gateway is answered, and what becomes of its requests: the endpoint picker protocol, without a gateway."""

import json

import pytest
from channels.db import database_sync_to_async

from controlplane import background
from controlplane.accounts.models import Tenant
from controlplane.gateway.process import Gateway
from controlplane.gateway.progress import Interrupt
from controlplane.planning.execution.loop import ScalingLoop
from tests.gateway.conftest import ServedGateway, until
from tests.gateway.test_relays import fleet  # noqa: F401 (a fixture)
from tests.picker.asking import BODY, BUFFERED, CHUNK_BYTES, FULL, ID, NONE, Asking, Picker, ext_proc, grpc, server

USAGE = {"prompt_tokens": 7, "completion_tokens": 5}


@pytest.fixture(autouse=True)
def _no_task_dies():
    before = sum(background.dead.values())
    yield
    assert sum(background.dead.values()) == before, background.summary()


def address_of(asking, index=0):
    return asking.served.backends[index].url.removeprefix("http://")


def unsettled(asking):
    """Sequences that count towards the tenant's limit."""
    return sum(use.sequences for use in asking.served.gateway.dispatching.allowances.limits._use.values())


@pytest.mark.parametrize("request_mode", [FULL, BUFFERED])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_request_is_answered_with_the_address_of_an_instance_and_the_body_for_it(asking, request_mode, pieces):
    answer = await asking.ask(request_mode=request_mode, pieces=pieces if request_mode == FULL else 1)
    assert answer.headers["x-gateway-destination-endpoint"] == address_of(asking)
    assert answer.destinations == [address_of(asking)]  # as dynamic metadata, too
    assert json.loads(answer.body) == BODY | {"priority": 0}
    assert answer.headers["content-length"] == str(len(answer.body))
    assert (answer.headers[":path"], answer.removed) == ("/v1/chat/completions", ["authorization", "x-api-key"])
    await asking.log(answer, usage=USAGE)
    row = await asking.served.new_row()
    assert (row.outcome, row.status_code, row.prompt_tokens, row.output_tokens) == ("done", 200, 7, 5)
    assert (row.instance, row.surface, unsettled(asking)) == ("m-0", "chat/completions", 0)


async def test_a_long_body_goes_out_in_pieces(asking):
    body = BODY | {"messages": [{"role": "user", "content": "x" * (2 * CHUNK_BYTES)}]}
    answer = await asking.ask(body, pieces=5)
    assert answer.pieces[:2] == [CHUNK_BYTES, CHUNK_BYTES]
    assert len(answer.pieces) == 3
    assert json.loads(answer.body)["messages"] == body["messages"]


async def test_times_and_usage_of_a_stream_are_those_of_the_access_log(asking):
    answer = await asking.ask(BODY | {"stream": True})
    assert json.loads(answer.body)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    await asking.log(answer, open=True, usage={"prompt_tokens": 7, "completion_tokens": 2}, first_ms=100, took_ms=0)
    await until(lambda: [one.output_tokens for one in asking.served.gateway.requests.streaming] == [2])
    await asking.log(answer, usage=USAGE, first_ms=100)
    row = await asking.served.new_row()
    assert (row.outcome, row.prompt_tokens, row.output_tokens) == ("done", 7, 5)
    assert row.e2e_ms - row.ttft_ms >= 200
    assert row.itl_ms >= 50


async def test_errors_of_ours_are_immediate_responses_with_our_bodies(asking):
    for given, status, code in (
        ({"authorization": "Bearer no"}, 401, "invalid_api_key"),
        ({"body": {"model": "unknown"}}, 404, "model_not_found"),
        ({"body": None}, 405, "method_not_allowed"),
        ({"body": None, ":path": "/nothing"}, 404, "unknown_url"),
        ({"body": {"model": "m"}, "x-slo-class": "forbidden"}, 403, "slo_class_not_allowed"),
    ):
        answer = await asking.ask(**given)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert not answer.destinations
    models = await asking.ask(None, **{":path": "/v1/models"})
    assert (models.status, [one["id"] for one in json.loads(models.body)["data"]]) == (200, ["m"])


async def test_a_tenant_over_its_limit_gets_429(asking):
    await database_sync_to_async(Tenant.objects.update)(max_concurrent_requests=1)
    await asking.served.gateway.keys.refresh()
    first = await asking.ask()
    answer = await asking.ask()
    assert (answer.status, answer.error["code"]) == (429, "concurrency_limit_exceeded")
    assert answer.headers["retry-after"] == "1"
    await asking.log(first, usage=USAGE)
    await until(lambda: not unsettled(asking))
    assert (await asking.ask()).destinations


async def test_without_an_instance_the_answer_is_503(asking):
    asking.served.backends[0].script.metrics = False
    assert await asking.served.becomes("failed")
    answer = await asking.ask(**{"x-max-wait": "0.1"})
    assert (answer.status, answer.destinations) == (503, [])


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])
async def test_the_subset_hint_is_obeyed(asking):
    for index in (0, 1, 0, 1):
        answer = await asking.ask(subset=f"10.0.0.1:80, {address_of(asking, index)}")
        assert answer.destinations == [address_of(asking, index)], answer
        await asking.log(answer, usage=USAGE)
    answer = await asking.ask(subset="10.0.0.1:80")
    assert (answer.status, answer.destinations) == (503, [])


@pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 1}])
async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(asking):
    first = await asking.ask()
    waiting = asking.call()
    await waiting.ask(authorization=f"Bearer {asking.served.secret}")
    await until(lambda: unsettled(asking) == 2)
    waiting.stream.cancel()
    await until(lambda: unsettled(asking) == 1)
    assert (await asking.served.new_row()).outcome == "cancelled"
    await asking.log(first, usage=USAGE)
    assert (await asking.ask()).destinations


async def test_a_client_that_leaves_later_pays_what_was_made_for_it(asking):
    answer = await asking.ask(BODY | {"stream": True})
    await asking.log(answer, status=0, details="downstream_remote_disconnect", left=True, usage=USAGE, first_ms=10)
    row = await asking.served.new_row()
    assert (row.outcome, row.error_code) == ("cancelled", "client_disconnected")
    assert (row.prompt_tokens, row.output_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("status", "details", "code", "worked"),
    [
        (400, "via_upstream", "refused_by_instance", False),
        (500, "via_upstream", "upstream_failed", True),
        (503, "upstream_reset_before_response_started{connection_failure}", "upstream_failed", False),
        (200, "upstream_reset_after_response_started{connection_termination}", "upstream_failed", True),
    ],
)
async def test_an_answer_that_failed_is_in_the_ledger(asking, status, details, code, worked):
    answer = await asking.ask()
    await asking.log(answer, status=status, details=details)
    row = await asking.served.new_row()
    assert (row.outcome, row.error_code, row.instance) == ("failed", code, "m-0")
    assert (row.prompt_tokens > 0) is worked  # of ours: the log has no usage
    assert unsettled(asking) == 0


@pytest.mark.parametrize("why", [Interrupt.KEY_ENDED, Interrupt.STOPPED])
async def test_what_the_gateway_has_is_not_taken_back_and_is_paid(asking, why):
    answer = await asking.ask(BODY | {"stream": True})
    await asking.log(answer, open=True, first_ms=100)
    await until(lambda: asking.served.gateway.requests.streaming)
    (progress,) = asking.served.gateway.requests.streaming
    progress.interrupt(why)
    await asking.log(answer, usage=USAGE)
    row = await asking.served.new_row()
    assert (row.outcome, row.output_tokens) == ("done", 5)


async def test_a_request_whose_instance_was_given_up_has_failed(asking):
    answer = await asking.ask(BODY | {"stream": True})
    await asking.log(answer, open=True, first_ms=100, usage=USAGE)
    await until(lambda: asking.served.gateway.requests.streaming)
    (progress,) = asking.served.gateway.requests.streaming
    progress.interrupt(Interrupt.INSTANCE_LOST)
    await until(lambda: unsettled(asking) == 0)
    row = await asking.served.new_row()
    assert (row.outcome, row.error_code, row.output_tokens) == ("failed", "upstream_failed", 5)


async def test_a_request_that_the_log_does_not_name_is_given_up(asking, monkeypatch):
    monkeypatch.setattr(server, "LOG_SILENCE_S", 0.05)
    await asking.ask()
    await until(lambda: unsettled(asking) == 0)
    assert "access log" in (await asking.served.new_row()).trace[-1]["lost"]


async def test_a_mode_in_which_nothing_can_be_decided_is_refused(asking):
    for modes in ((NONE, NONE), (FULL, BUFFERED)):
        call = asking.call(*modes)
        await call.ask(authorization=f"Bearer {asking.served.secret}")
        answer = await call.answer()
        assert (answer.status, answer.error["code"]) == (500, "gateway_misconfigured")


async def test_a_stream_never_ends_well_without_an_answer(asking):
    """The gateway would go on without one, to the address that its client may have sent."""
    call = asking.call()
    await call.stream.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"{}")))
    await call.stream.done_writing()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.answer()


async def test_entries_of_requests_that_are_not_ours_change_nothing(asking):
    answer = await asking.ask()
    other = await asking.ask()
    answer.headers[ID], mine = "0" * 32, answer.headers[ID]
    await asking.log(answer, usage=USAGE)
    assert unsettled(asking) == 2
    answer.headers[ID] = mine
    for each in (answer, other):
        await asking.log(each, usage=USAGE)
    assert [row.outcome for row in await asking.served.rows()] == ["done", "done"]


async def test_health_follows_ownership(asking):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(asking.channel)
    service = health_pb2.HealthCheckRequest(service="envoy.service.ext_proc.v3.ExternalProcessor")
    states = health_pb2.HealthCheckResponse
    assert (await stub.Check(service)).status == states.SERVING
    asking.picker.application.stopping = True
    assert (await stub.Check(service)).status == states.NOT_SERVING


async def test_requests_are_placed_by_the_dispatcher_in_another_process(fleet):  # noqa: F811
    gateway = Gateway(ScalingLoop, "relay")
    gateway.lease.owner += "-picker"
    await gateway.start()
    picker = Picker(gateway)
    port = await picker.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        asking = Asking(ServedGateway(gateway, "", fleet.backends, fleet.http), picker, channel)
        await until(lambda: gateway.dispatchers.routes and gateway.serves())
        answers = [await asking.ask() for _ in range(2)]
        assert {answer.destinations[0] for answer in answers} == {address_of(asking, index) for index in (0, 1)}
        running = fleet.owner.dispatching.dispatcher.requests
        assert len(running) == 2
        for answer in answers:
            await asking.log(answer, usage=USAGE)
        await until(lambda: not running)
        assert [(row.outcome, row.output_tokens) for row in await asking.served.rows()] == [("done", 5)] * 2
    await picker.stop(0.0)
    await gateway.stop()
