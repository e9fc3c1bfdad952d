"""Runs that nothing marks, recognized by conversation: a request that repeats the turns of an earlier one, then the model's
answer, and adds something, is a call of the same run.

Only hashes are kept, of the latest conversations; a hash is of this process alone and no text can be read from it. A first
request is not known to be a call of a run before a second one extends it, so the run is named after the first one's id: what
follows runs finds it in the ledger by that. An id that a client gave may be that of all its requests, so that the name has
the moment too. The application is named after the system prompt. Recognized names begin with
`RECOGNIZED`, which marks cannot, so that no run counts twice.
"""

import re
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from typing import Any, Final

from controlplane.gateway.admission.marks import Marks
from controlplane.gateway.admission.turns import Turn
from controlplane.gateway.admission.validation import Call
from scheduling.applications.recording import AFTER_TOOL, AFTER_USER, RECOGNIZED, run_named

MOST_CONVERSATIONS: Final = 50_000
"""Hashes kept, about 10 MB: one for each request; the one that was used least lately goes first."""
MOST_SESSIONS: Final = 10_000
"""Sessions kept that other sessions began."""
MOST_PROMPTS: Final = 4_096
"""System prompts whose digests are kept, by their hashes: a digest takes 100 us."""
READ_CHARACTERS: Final = 128
"""Of a turn count its length and so many characters at either end, which bounds the time for long prompts."""
SYSTEM_CHARACTERS: Final = 4_096
"""Of a system prompt count so many, without its digits: it may have a date or a time."""
DIGITS: Final = re.compile(r"\d+")
SYSTEM_ROLES: Final = ("system", "developer")
TOOL_ROLES: Final = ("tool", "function")
NO_PROMPT: Final = f"{RECOGNIZED}conversation"
"""Application of conversations without a system prompt."""


class _LatestNames:
    """A bounded mapping to names that forgets what was used least lately."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, OrderedDict[Hashable, str]()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> str | None:
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    def put(self, key: Hashable, value: str) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


class Conversations:
    """Completes the marks of requests. *on*: whether runs are recognized by conversation."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._runs, self._roots = _LatestNames(MOST_CONVERSATIONS), _LatestNames(MOST_SESSIONS)
        self._digests = _LatestNames(MOST_PROMPTS)

    def complete(
        self,
        marks: Marks,
        call: Call,
        caller: Hashable,
        request_id: str,
        *,
        again: bool = False,
        given_at: float | None = None,
    ) -> Marks:
        """Return *marks* with the run of the conversation where none is marked, and an application and unit for it.

        *caller* is the key that sent it: conversations of others are not compared. *given_at*: when a request came whose id
        its client gave, in epoch seconds; None for an id of ours, which no other request has.
        """
        run = marks.run
        if marks.parent:
            run = self._root_of(caller, run, marks.parent)
        elif not run and self.on and call.turns:
            run = self._run_of(call, caller, run_named(request_id, given_at), again=again)
        if not run or (marks.run and not marks.session):
            return marks
        unit = marks.unit or (AFTER_TOOL if call.turns and call.turns[-1][0] in TOOL_ROLES else AFTER_USER)
        return marks._replace(application=marks.application or self._application_of(call), run=run, unit=unit)

    def _root_of(self, caller: Hashable, session: str, parent: str) -> str:
        """Return the session that began *parent*, or one before it."""
        root = self._roots.get((caller, parent)) or parent
        if root != session:
            self._roots.put((caller, session), root)
        return root

    def _run_of(self, call: Call, caller: Hashable, own: str, *, again: bool) -> str:
        """Return the run of a conversation, empty for a first request; *own*: the run that it would begin, *again*: it is
        sent a second time.
        """
        user = call.body.get("user") or call.body.get("safety_identifier")
        hashes = list(self._hashes(call.turns, hash((caller, user if isinstance(user, str) else ""))))
        run = (self._runs.get(hashes[-1]) or "") if again else ""
        for at in range(len(call.turns) - 1, 0, -1):
            if run:
                break
            if call.turns[at][0] == "assistant":
                run = self._runs.get(hashes[at - 1]) or ""
        self._runs.put(hashes[-1], run or own)
        return "" if run == own else run

    def _hashes(self, turns: list[Turn], seed: int) -> Iterator[int]:
        """Yield the hash of the conversation up to the end of each turn."""
        for role, content in turns:
            if role in SYSTEM_ROLES:
                seed = hash((seed, role, self._digest(content)))
            else:
                for text in (content,) if type(content) is str else _texts(content):
                    seed = hash((seed, role, len(text), text[:READ_CHARACTERS], text[-READ_CHARACTERS:]))
            yield seed

    def _digest(self, content: Any) -> str:
        prompt = "\n".join(_texts(content))[:SYSTEM_CHARACTERS]
        if not (digest := self._digests.get(key := hash(prompt))):
            digest = digest_of(prompt)
            self._digests.put(key, digest)
        return digest

    def _application_of(self, call: Call) -> str:
        return next((self._digest(content) for role, content in call.turns if role in SYSTEM_ROLES), NO_PROMPT)


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a turn; of an image or the like, its kind."""
    for part in content if isinstance(content, list) else [{"text": content or ""}]:
        text = part.get("text")
        yield text if isinstance(text, str) else f"\0{str(part.get('type'))[:40]}"


def digest_of(prompt: str) -> str:
    """Return the name of an application that is only known by its system prompt."""
    if not prompt:
        return NO_PROMPT
    return RECOGNIZED + blake2b(DIGITS.sub("0", prompt).encode(errors="replace"), digest_size=4).hexdigest()
