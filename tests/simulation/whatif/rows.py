"""What-ifs for tests: a small fleet's synthetic start, rows of each kind, and a what-if that has run."""

import tomllib
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.utils import timezone

from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.simulation.whatif import services, working
from controlplane.simulation.whatif.models import Future, FutureSeed, TraceFile, TwinError, WhatIf
from controlplane.simulation.whatif.start import Start
from tests.scheduling.simulation.test_scenario import RIGHT


def start(**tables: Any) -> dict[str, Any]:
    """Return one model in two regions under reactive scaling, as JSON of a `Start`."""
    scenario = tomllib.loads(RIGHT) | {"title": "Small"} | tables
    return {"kind": "synthetic", "at": timezone.now().isoformat(), "scenario": scenario}


def as_it_went(fork: Start, horizon_s: float) -> Start:
    """Return *fork* with the requests that came within *horizon_s*, and the lengths that those open at the fork had."""
    state, until = fork.state, fork.at + timedelta(seconds=horizon_s)
    done = LedgerRow.objects.filter(request_id__in=[one.request_id for one in state.requests], outcome=Outcome.DONE)
    lengths = {row.request_id: (row.prompt_tokens, max(1, row.output_tokens)) for row in done}
    open_then = {}
    for kind in ("running", "waiting", "held"):
        open_then[kind] = own = list(getattr(state, kind))
        for at, one in enumerate(own):
            if one.request_id in lengths:
                prompt, output = lengths[one.request_id]
                own[at] = msgspec.structs.replace(one, prompt_tokens=prompt or one.prompt_tokens, true_output=output)
    came = {"kind": "ledger", "since": fork.at.isoformat(), "until": until.isoformat()}
    return fork.model_copy(update={"arrivals": came, "state": msgspec.structs.replace(state, **open_then)})


def draft(actor: Any, *futures: dict[str, Any], **values: Any) -> WhatIf:
    given = {"title": "What if", "start": start(), "horizon_s": 1200.0, "seeds": 2} | values
    return services.write(given, list(futures), actor)


def run_all(row: WhatIf) -> WhatIf:
    """Make every run of *row* in this process."""
    while working.work() is not None:
        pass
    row.refresh_from_db()
    return row


def furnish(title: str, text: str, now: datetime) -> None:
    """Write a row of each kind, with *text* where a user wrote one."""
    what_if = WhatIf.objects.create(title=title)
    future = Future.objects.create(what_if=what_if, letter="A", name="As now")
    FutureSeed.objects.create(future=future, seed=1, error=text)
    TraceFile.objects.create(name=text, format="azure", content=b"", requests=1, span_s=1.0)
    TwinError.objects.create(model="m", gpu="h100", from_at=now, to_at=now, requests=9, measured={}, simulated={})
