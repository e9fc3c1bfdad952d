"""The gateway's end of the port: records that it submits, and its handling of those that return."""

import asyncio
from types import SimpleNamespace

import pytest

from controlplane.dispatch.port import (
    DEAD,
    Advanced,
    Asked,
    Finished,
    Left,
    Lost,
    Placed,
    Prefix,
    PrefixWanted,
    Queued,
    Refused,
    Rerouted,
)
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import ApiError
from controlplane.gateway.serving.open_requests import Interrupt, OpenRequests, Ticket, TicketState
from controlplane.gateway.serving.prefixes import BLOCK_IDS, leading_hashes


class GatewaySide:
    """Requests without a client: *records* is the dispatcher's input."""

    def __init__(self):
        self.records = []
        self.requests = OpenRequests(lambda: 10.0, self.records.append)

    def ticket(self, *, streamed=True) -> Ticket:
        number = self.requests.next_number()
        asked = Asked(number, f"r{number}", "m", "east", 1, 0, None, 1e9, 1.0, 100, 40, None, 1, streamed)
        ticket = Ticket(
            asked=asked, grant=None, terms=None, call=SimpleNamespace(kind=Kind.CHAT, sequences=1), query=None
        )
        self.requests.submit(ticket)
        return ticket

    def placed(self, ticket: Ticket, attempt=1) -> Placed:
        number = ticket.asked.number
        self.requests.on_event(Queued(number, "east", 30))
        record = Placed(
            number, attempt, "m-0", 1e9, "http://x", "", "east", "fcfs", 1e9, 4.0, {"instance": "m-0"}, 600.0
        )
        self.requests.on_event(record)
        return record


@pytest.fixture
async def side() -> GatewaySide:
    return GatewaySide()


async def test_a_stream_says_when_it_was_heard_of_last(side):
    ticket = side.ticket()
    side.placed(ticket)
    ticket.connection = SimpleNamespace(heard_s=9.5)
    assert side.requests.last_heard() == {}, "it has not begun"
    side.requests.began(ticket)
    ticket.output_tokens = 3
    assert side.requests.last_heard() == {ticket.asked.number: 9.5}
    assert side.records[-1] == Advanced(((ticket.asked.number, 3),))
    ticket.connection = None
    assert side.requests.last_heard() == {}, "its instance has gone"


async def test_a_request_hears_where_it_waits_and_where_it_runs(side):
    ticket = side.ticket()
    assert side.records == [ticket.asked]
    side.requests.on_event(Queued(0, "east", 30))
    assert (ticket.state, ticket.region, ticket.predicted_tokens) == (
        TicketState.WAITING,
        "east",
        30,
    )
    side.requests.on_event(Rerouted(0, "west", 30, came_from="east", pressure=1.5))
    assert ticket.region == "west"
    record = Placed(0, 1, "m-0", 1e9, "http://x", "", "west", "fcfs", 1e9, 4.0, {"instance": "m-0"}, 600.0)
    side.requests.on_event(record)
    assert await ticket.placement is record
    assert (ticket.state, ticket.instance, ticket.attempts) == (TicketState.PLACED, "m-0", 1)
    assert ticket.steps == [{"moved": "east to west", "pressure": 1.5}, {"instance": "m-0"}]


async def test_the_progress_of_all_streams_is_one_record_and_none_when_nothing_came(side):
    tickets = [side.ticket() for _ in range(100)]
    whole = side.ticket(streamed=False)
    for ticket in [*tickets, whole]:
        side.placed(ticket)
    for ticket in tickets:
        side.requests.began(ticket)
    side.requests.answered_whole(whole, None)
    side.records.clear()
    side.requests.report()
    for ticket in tickets[:3]:
        ticket.output_tokens += 7
    for _ in range(2):
        side.requests.report()
    first, second = side.records
    assert sorted(first.tokens) == [(number, 0) for number in range(100)], "that it began is said too"
    assert sorted(second.tokens) == [(0, 7), (1, 7), (2, 7)]
    side.requests.headers_received(tickets[0])
    assert side.records[-1] == Advanced(headers=((0, 6.0),))


async def test_how_the_prompt_of_a_waiting_request_begins_is_said_when_it_is_wanted(side):
    ticket = side.ticket()
    body = {"prompt": list(range(2 * BLOCK_IDS + 5))}
    ticket.call = SimpleNamespace(kind=Kind.COMPLETION, model="m", body=body, prompt_characters=1)
    side.requests.on_event(PrefixWanted(0))
    assert side.records[1:] == [Prefix(0, tuple(leading_hashes(ticket.call, 100)[0]), BLOCK_IDS)]
    assert len(side.records[1].hashes) == 2


async def test_a_refusal_becomes_the_error_that_the_tenant_sees(side):
    ticket = side.ticket()
    side.requests.on_event(Refused(0, 429, "queue_full", "Full.", 2.5, estimated_wait_s=5.0, region="west"))
    with pytest.raises(ApiError, match="Full") as caught:
        await ticket.placement
    error = caught.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "queue_full")
    assert (error.retry_after_s, error.estimated_wait_s, ticket.region) == (2.5, 5.0, "west")
    other = side.ticket()
    side.requests.on_event(Refused(1, 503, "model_unavailable", "None.", 15))
    with pytest.raises(ApiError) as caught:
        await other.placement
    assert (caught.value.status, caught.value.type) == (503, "server_error")


async def test_a_request_that_lost_its_instance_is_placed_again(side):
    ticket = side.ticket()
    side.placed(ticket)
    first = ticket.placement
    side.requests.place_again(ticket, reason="m-0: it died", failure=DEAD)
    assert side.records[-1] == Left(0, again=True, failure=DEAD, reason="m-0: it died")
    assert ticket.placement is not first
    side.placed(ticket, attempt=2)
    assert (await ticket.placement).attempt == 2
    assert [entry.get("lost") for entry in ticket.steps] == ["m-0: it died", None]


async def test_it_leaves_once_and_hears_nothing_afterwards(side):
    done, gone = side.ticket(), side.ticket()
    side.placed(done)
    side.records.clear()
    side.requests.finished(done)
    side.requests.leave(done)
    side.requests.leave(gone, failure=DEAD)
    side.requests.leave(gone)
    assert side.records == [Finished(0), Left(1, failure=DEAD)]
    side.requests.on_event(Placed(1, 1, "m-0", 1e9, "http://x", "", "east", "fcfs", 1e9, 4.0, {}, 600.0))
    assert gone.state is TicketState.ACCEPTED
    await asyncio.sleep(0)
    assert side.records[2:] == [Left(1)], "the place that it was given is free again"


async def test_the_task_of_a_request_whose_instance_is_lost_is_interrupted(side):
    ticket = side.ticket()
    cancelled = []
    ticket.task = SimpleNamespace(cancel=lambda: cancelled.append(True))
    side.placed(ticket)
    side.requests.on_event(Lost(0))
    assert cancelled == [True]
    assert ticket.interrupted is Interrupt.INSTANCE_LOST
