"""Every record of the port can be serialised: it comes back from JSON and from msgpack as it was."""

import typing

import msgspec
import pytest
from msgspec.structs import astuple, fields

from controlplane.dispatch import port

RECORDS = [
    port.Asked(
        number=7, request_id="a", model="m", region="east", tenant_id=1, priority=2, due_s=None, arrived_at=1.5e9,
        arrived_s=12.25, prompt_tokens=100, predicted_tokens=40.5, max_tokens=None, sequences=2, streamed=True,
        prefix_hashes=(-(2**63), 2**63 - 1), block_tokens=64, slo_class="batch",
    ),
    port.Advanced(tokens=((7, 11), (8, 0)), headers=((7, 0.125),)),
    port.RunReport("ended", 1, "review", "r-1", 3, "tests", duration_s=7.5),
    port.Warm("i", 3.5, "http://i", "secret", "sql", "acme/sql", ("poet",), True),
    port.WarmPrefix("i", 3.5, "http://i", "secret", -(2**63)),
    port.PrefixWarmed("i", 3.5, -(2**63), "It did not answer."),
    port.Finished(7, 40),
    port.Arrived("m"),
    port.RelayFigures(
        3, "web:7", "web", 7, 1.5e9, draining=True, active=4, streaming=3, busy_ratio=0.25, ledger_held=1, ledger_written=40,
        ledger_given_up=2, ledger_refused=5, errors=((429, "queue_full", 7),),
    ),
    port.Ended(
        "m", "east", "m-0", "batch", "interactive", "done", 100, 40, 64, 60, port.ESTIMATE, 12.5, 80.25, None, 900.5, 0.0,
        True, 0.95, 500, "degraded", "chat", "weights", "sql",
    ),
    port.Left(7, again=True, failure=port.DEAD, evicted=True, kept_tokens=12),
    port.Waiting(7, 3, 1.5, None),
    port.Queued(7, "west", 40),
    port.Rerouted(7, "west", 40, came_from="east", pressure=1.25),
    port.Forward(7, "eu", own_region="east"),
    port.FellBack(7, "n", "west", 40, "wait", "Served by n."),
    port.Backlog("m", ((3600.0, 40),)),
    port.Held(9, "us-east", 120, "Held: use 72%, releases below 60%", own_region="us-east"),
    port.Placed(
        number=7, attempt=1, instance="m-0", ready_at=1.25e9, url="http://127.0.0.1:1", api_key="secret", region="east",
        ordering="ssjf", queue_key_s=1.5e9, placed_s=13.5, why=port.Reasons(
            "least_delay", 3, 100, {"m-0": [0.5, 1.0]}, 12.5, 64, port.ESTIMATE, port.Pulled(2, 7, 40, -1.5),
            port.RunRank(3.5, 1.5, 2.5, 9.5, first=True), "on the GPU"
        ),
        first_token_s=600.0,
    ),
    port.Refused(7, 429, "queue_full", "The queue is full.", retry_after_s=2.5, estimated_wait_s=5.0, region="east"),
    port.Admission(7, "batch", late_s=0.0, wait_p99_s=12.5),
    port.Enter(7, 1, 3, "m", 140, 2, 8, 60_000, rates=True, held=True),
    port.Leave(7, 120, "n"),
    port.LoadWanted(8, 1),
    port.Registered(3, "shard 1", (3, 4)),
    port.Entered(7, ("acme: 81.00 of $100.00 a month",)),
    port.NotEntered(7, 429, "rate_limit_exceeded", "Reached.", 1.5, "insufficient_quota", ((b"x-budget", b"acme"),)),
    port.Load(8, 12),
    port.Spent(((1, None, ""), (None, None, "m"))),
    port.Room({"shard 1 in eu": {"m": 12}}),
    port.Lost(7, 1),
    port.Evict(7),
    port.ServedModels(
        (port.ServedModel("m", 4096, 1_500_000_000, has_endpoint=True, by_prefix=False),),
        (port.WeightedTargets("chat", 1_500_000_000, {"m": 95.0}),),
    ),
]  # fmt: skip
PLACED = next(record for record in RECORDS if isinstance(record, port.Placed))
RECORDS += [port.Open(RECORDS[0], placed, 12, 3, 2, 1, released=True) for placed in (None, PLACED)]


@pytest.mark.parametrize("form", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record, form):
    again = form.decode(form.encode(record), type=type(record))
    assert again == record
    assert list(map(type, astuple(again))) == list(map(type, astuple(record)))


def test_every_record_of_the_port_is_tried_and_none_can_be_changed():
    of_port = set(typing.get_args(port.FromGateway)) | set(typing.get_args(port.FromDispatcher))
    assert {type(record) for record in RECORDS} == of_port
    for record in RECORDS:
        with pytest.raises(AttributeError):
            setattr(record, fields(type(record))[0].name, 0)


def test_no_secret_of_an_instance_is_shown():
    placed = next(record for record in RECORDS if isinstance(record, port.Placed))
    assert placed.api_key not in repr(placed)
