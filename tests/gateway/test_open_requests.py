"""The gateway's end of the port: records that it submits, and its handling of those that return."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec import structs

from controlplane.dispatch.port import (
    DEAD,
    Admission,
    Advanced,
    Asked,
    Finished,
    Left,
    Lost,
    Placed,
    Queued,
    Reasons,
)
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.progress import Interrupt, Progress, RequestState
from controlplane.gateway.serving.completions import Completions
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.upstream.answers import InstanceLost, Usage
from scheduling.queueing.promises import ClassTerms

WHY = Reasons("round_robin", 0, 100, {"m-0": [0.0]})


class GatewaySide:
    """Requests without a client: *records* is the dispatcher's input."""

    def __init__(self):
        self.records = []
        self.requests = OpenRequests(lambda: 10.0, self.records.append)

    def request(self, *, streamed=True) -> Progress:
        number = self.requests.next_number()
        asked = Asked(number, f"r{number}", "m", "east", 1, 0, None, 1e9, 1.0, 100, 40, None, 1, streamed)
        progress = Progress(asked=asked, grant=None, terms=None, call=SimpleNamespace(kind=Kind.CHAT, sequences=1))
        self.requests.submit(progress)
        return progress

    def placed(self, progress: Progress, attempt=1) -> Placed:
        number = progress.asked.number
        self.requests.on_event(Queued(number, "east", 30))
        record = Placed(number, attempt, "m-0", 1e9, "http://x", "", "east", "fcfs", 1e9, 4.0, WHY, 600.0)
        self.requests.on_event(record)
        return record


@pytest.fixture
async def side() -> GatewaySide:
    return GatewaySide()


async def test_a_stream_says_when_it_was_heard_of_last(side):
    progress = side.request()
    side.placed(progress)
    progress.connection = SimpleNamespace(heard_s=9.5)
    assert side.requests.last_heard() == {}, "it has not begun"
    side.requests.began(progress)
    progress.output_tokens = 3
    assert side.requests.last_heard() == {progress.asked.number: 9.5}
    assert side.records[-1] == Advanced(((progress.asked.number, 3),))
    progress.connection = None
    assert side.requests.last_heard() == {}, "its instance has gone"


async def test_the_progress_of_all_streams_is_one_record_and_none_when_nothing_came(side):
    requests = [side.request() for _ in range(100)]
    whole = side.request(streamed=False)
    for progress in [*requests, whole]:
        side.placed(progress)
    for progress in requests:
        side.requests.began(progress)
    side.requests.answered_whole(whole, None)
    side.records.clear()
    side.requests.report()
    for progress in requests[:3]:
        progress.output_tokens += 7
    for _ in range(2):
        side.requests.report()
    first, second = side.records
    assert sorted(first.tokens) == [(number, 0) for number in range(100)], "that it began is said too"
    assert sorted(second.tokens) == [(0, 7), (1, 7), (2, 7)]
    side.requests.headers_received(requests[0])
    assert side.records[-1] == Advanced(headers=((0, 6.0),))


async def test_it_leaves_once_and_hears_nothing_afterwards(side):
    done, gone = side.request(), side.request()
    side.placed(done)
    side.records.clear()
    side.requests.finished(done, Usage())
    side.requests.leave(done)
    side.requests.leave(gone, failure=DEAD)
    side.requests.leave(gone)
    assert side.records == [Finished(0), Left(1, failure=DEAD)]
    side.requests.on_event(Placed(1, 1, "m-0", 1e9, "http://x", "", "east", "fcfs", 1e9, 4.0, WHY, 600.0))
    assert gone.state is RequestState.ACCEPTED
    await asyncio.sleep(0)
    assert side.records[2:] == [Left(1)], "the place that it was given is free again"


async def test_the_task_of_a_request_whose_instance_is_lost_is_interrupted(side):
    progress = side.request()
    cancelled = []
    progress.task = SimpleNamespace(cancel=lambda: cancelled.append(True))
    side.placed(progress)
    side.requests.on_event(Lost(0, progress.attempts))
    assert cancelled == [True]
    assert progress.interrupted is Interrupt.INSTANCE_LOST


async def test_one_that_has_left_the_lost_instance_is_not_interrupted(side):
    progress = side.request()
    cancelled = []
    progress.task = SimpleNamespace(cancel=lambda: cancelled.append(True))
    side.placed(progress)
    side.requests.place_again(progress, InstanceLost("m-0: it ended", DEAD))
    side.requests.on_event(Lost(0, 1))
    side.placed(progress, attempt=2)
    side.requests.on_event(Lost(0, 1))
    assert cancelled == []
    side.requests.on_event(Lost(0, 2))
    assert cancelled == [True]


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        (Lost(0, 1), None),
        (Lost(0, 1, stopped=True), "run_stopped"),
        (Lost(0, 1, reclaimed=True), "spot_reclaimed"),
    ],
)
async def test_the_news_of_a_loss_before_it_is_sent_there_places_it_again_or_says_why(side, lost, code):
    carried, told = [], []

    async def carry(progress, placed, responder):
        carried.append(placed.instance)
        return Usage()

    async def error(why):
        told.append(why.code)

    async def ping():
        pass

    progress = side.request()
    side.requests.submit = lambda progress: None
    entries = SimpleNamespace(enter=lambda progress: None)
    completions = Completions(
        None, SimpleNamespace(entries=entries), side.requests, SimpleNamespace(carry=carry),
        SimpleNamespace(close=lambda *given: None), lambda: True, 9, 9, 9,
    )  # fmt: skip
    responder = SimpleNamespace(error=error, ping_in_s=9.0, ping_if_silent=ping, completed=None)
    progress.task = asyncio.create_task(completions._serve(progress, responder))
    await asyncio.sleep(0)
    side.placed(progress)
    side.requests.on_event(lost)
    await asyncio.sleep(0.01)
    if code is None:
        assert (told, carried) == ([], [])
        side.placed(progress, attempt=2)
    await progress.task
    assert told == ([] if code is None else [code])
    assert carried == (["m-0"] if code is None else [])


async def test_one_whose_client_is_being_told_of_its_end_takes_no_place(side):
    progress = side.request()
    progress.move(RequestState.FAILED)
    side.records.clear()
    assert side.requests.opened() == []
    side.placed(progress)
    await asyncio.sleep(0)
    assert side.records == [Left(0)]


async def test_what_runs_is_registered_before_what_waits(side):
    """Else what waits would be given its room."""
    requests = [side.request() for _ in range(3)]
    side.placed(requests[2])
    assert [one.number for one in side.requests.opened()] == [2, 0, 1]


async def test_the_next_dispatcher_hears_of_the_terms_that_it_waits_on(side):
    degraded, _ = side.request(), side.request()
    batch = ClassTerms("batch", priority=2, due_s=60.0, interactive=False)
    degraded.asked = structs.replace(degraded.asked, slo_class="chat", fallbacks=(batch,))
    degraded.terms = SimpleNamespace(slo_class="chat")
    degraded.grant = SimpleNamespace(terms={"batch": SimpleNamespace(slo_class="batch")})
    side.requests.on_event(Admission(0, "batch", late_s=0.0, wait_p99_s=1.0))
    side.requests.on_event(Queued(1, "east", 30, released={"why": "room", "priority": 3}))
    asked = [one.asked for one in side.requests.opened()]
    assert [(one.slo_class, one.priority, one.due_s, one.interactive) for one in asked] == [
        ("batch", 2, 60.0, False),
        ("", 3, None, True),
    ]


async def test_what_lost_its_instance_ends_where_this_process_places_nothing(side):
    cancelled, requests = [], [side.request() for _ in range(3)]
    for progress in requests:
        progress.task = SimpleNamespace(cancel=lambda number=progress.asked.number: cancelled.append(number))
    for progress in requests[:2]:
        side.placed(progress)
        side.requests.began(progress)
    side.requests.place_again(requests[0], InstanceLost("m-0: it ended", DEAD))
    side.requests.stand_by()
    assert cancelled == [0, 2]
