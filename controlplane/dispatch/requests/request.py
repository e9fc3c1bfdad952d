"""A request as the decision side has it: what was asked, where it waits or runs, and what the arrays know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.dispatch.port import Submit

if TYPE_CHECKING:
    from controlplane.dispatch.live_fleet.topology import Endpoint, Replica


@dataclass(slots=True, eq=False)
class Request:
    asked: Submit
    predicted_tokens: int  # output that may come
    endpoint: Endpoint  # where it waits or runs
    slot: int = -1  # in the waiting set, while waiting
    queue_key_s: float = 0.0  # there, on the clock of `Submit.arrived_at`
    replica: Replica | None = None
    attempts: int = 0
    placed_s: float = 0.0
    output_tokens: int = 0  # that came so far
    expected_tokens: int = 0  # prompt and output, as the fleet arrays reserved them
    counted_tokens: int = 0  # of those, what the arrays know to be done
    expected_prompt: int = 0  # of those, the prompt
    queued_tokens: int = 0  # of the prompt, what the arrays count as not prefilled
    ahead: int = -1  # in the look-ahead maps, while an instance has it
    ahead_tokens: int = 0  # output tokens that the maps know of
