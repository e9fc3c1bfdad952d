"""Retries: a request that a client resends is demand once.

The OpenAI SDKs send the number of the attempt in a header, but not the request it repeats. All attempts share the key and
the body, so those of requests that were counted as demand and got no token are remembered for a while.
"""

from collections import OrderedDict

RETRY_HEADER = b"x-stainless-retry-count"
"""Header of the OpenAI SDKs: 0 with the first attempt, 1 with the first retry."""
KEPT_S = 120.0
"""Time remembered. SDKs wait at most 60 s, the longest `Retry-After` that they obey, before they resend a request."""
MOST = 50_000
"""Requests remembered; beyond that the oldest are dropped."""

Body = tuple[int, int]
"""Key and hash of the body."""


class Retries:
    def __init__(self) -> None:
        self._counted: OrderedDict[Body, float] = OrderedDict()  # time of the end, oldest first

    def __len__(self) -> int:
        return len(self._counted)

    def note(self, key_id: int, body: bytes, now_s: float) -> None:
        """Remember a request that was counted as demand, and ended without a token."""
        asked = key_id, hash(body)
        self._counted[asked] = now_s
        self._counted.move_to_end(asked)
        if len(self._counted) > MOST:
            self._counted.popitem(last=False)

    def counted(self, key_id: int, body: bytes, arrived_s: float) -> bool:
        """Whether a retry that came at *arrived_s* repeats a request that was counted."""
        ended_s = self._counted.get((key_id, hash(body)))
        return ended_s is not None and arrived_s - ended_s <= KEPT_S


def retry_number(value: bytes) -> int:
    """Return the attempt in the header's *value*: 0 for the first, and for anything but a number of up to three digits."""
    return int(value) if value.isdigit() and len(value) <= 3 else 0
