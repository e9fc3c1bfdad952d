"""What a relay reports of itself, for System and `/metrics` of the first dispatcher."""

import os
import socket

from controlplane.dispatch.port import RelayFigures
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.serving.application import Application

REPORT_S = 1.0


def relay_figures(
    name: str, number: int, started_at: float, http: Application, ledger: Ledger, *, draining: bool
) -> RelayFigures:
    """Return the figures, at this moment, of relay *number*, called *name*."""
    completions = http.completions
    return RelayFigures(
        relay=number,
        name=name,
        host=socket.gethostname(),
        process_id=os.getpid(),
        started_at=started_at,
        draining=draining,
        active=http.active,
        streaming=len(completions.requests.streaming),
        busy_ratio=completions.load.share,
        ledger_held=ledger.held,
        ledger_written=ledger.written,
        ledger_given_up=ledger.given_up,
        ledger_refused=ledger.refused,
        errors=tuple((*key, count) for key, count in completions.records.errors.items()),
    )
