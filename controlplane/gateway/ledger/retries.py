"""Retries: a request that a client sends again is demand once.

The OpenAI SDKs say in a header which attempt it is, not of which request. What is the same in all attempts is the key and
the body, so that of those that were counted as demand and got no token is remembered for a while.
"""

from collections import OrderedDict

RETRY_HEADER = b"x-stainless-retry-count"
"""Of the OpenAI SDKs: 0 with the first attempt, 1 with the first retry."""
KEPT_S = 120.0
"""SDKs wait at most 60 s, which is the longest `Retry-After` that they obey, before they send a request again."""
MOST = 50_000
"""Requests remembered; beyond it the oldest are forgotten."""

Body = tuple[int, int]
"""Key and hash of the body."""


class Retries:
    def __init__(self) -> None:
        self._counted: OrderedDict[Body, float] = OrderedDict()  # when it ended, oldest first

    def __len__(self) -> int:
        return len(self._counted)

    def note(self, key_id: int, body: bytes, now_s: float) -> None:
        """A request was counted as demand, and ended now without a token."""
        asked = key_id, hash(body)
        self._counted[asked] = now_s
        self._counted.move_to_end(asked)
        if len(self._counted) > MOST:
            self._counted.popitem(last=False)

    def counted(self, key_id: int, body: bytes, arrived_s: float) -> bool:
        """Whether a retry that came at *arrived_s* is of a request that was counted."""
        ended_s = self._counted.get((key_id, hash(body)))
        return ended_s is not None and arrived_s - ended_s <= KEPT_S


def retry_number(value: bytes) -> int:
    """Of the header's *value*: 0 for the first attempt, and for what is no number of up to three digits."""
    return int(value) if value.isdigit() and len(value) <= 3 else 0
