"""The field's terms in headings and labels, explained where the pointer rests; the words are those of docs/glossary.md."""

import re
from typing import Final

from controlplane.planning.parts import NAMES

TERMS: Final = {
    "TTFT": "time to the first token",
    "ITL": "time between two tokens of an answer",
    "E2E": "time to the last token",
    "KV cache": "memory of an instance for the keys and values of the tokens that it works on",
    "SLO class": "targets of a request: TTFT, ITL, E2E, deadline, priority",
    "SLO met": "share of requests within the targets of their SLO class",
    "slack": "how long a request can still wait",
    "prefix": "start of a prompt; equal ones share KV blocks",
    "request group": "requests of one model, region, class and similar length, ordered together",
    "virtual queue": "the ordered request groups of an instance",
    "look-ahead map": "KV tokens of an instance in each of the next iterations",
    "spot": "instances that serve opportunistic requests at a lower price until they are reclaimed",
    "donated": "of an instance: given to the spot pool instead of stopped",
    "deferred": "of work: non-interactive, due by its deadline",
    "forecast load": "the highest window of a forecast over the capacity that there is now",
    "shard": "models whose requests one dispatcher decides about, in each zone",
}
_LONGEST_FIRST: Final = [
    (re.compile(rf"\b{re.escape(term)}s?\b", re.IGNORECASE), f"{term}: {meaning}")
    for term, meaning in sorted(TERMS.items(), key=lambda one: -len(one[0]))
]


def explained(label: str) -> str:
    """Return the name, or the first of the longest terms in *label*, with its meaning; nothing where there is none."""
    if label in NAMES:
        return f"{label}: {NAMES[label]}"
    text = next((text for pattern, text in _LONGEST_FIRST if pattern.search(label)), "")
    return text[:1].upper() + text[1:]
