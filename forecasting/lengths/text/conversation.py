"""The messages of a conversation as a length model is asked about them: bounded text, and what is known of the rest.

The last message is what is to be answered; of those before it their number and sizes count, and how long the assistant's
answers were so far. The text holds all messages, one after the other, of which the beginning and the end are kept.
"""

from collections.abc import Sequence
from typing import Final

from forecasting.lengths.query import Conversation

KEPT_HEAD, KEPT_TAIL = 512, 3584
MOST_TURNS_READ: Final = 512
SYSTEM: Final = ("system", "developer")
ASSISTANT: Final = "assistant"


def joined(texts: Sequence[str], first: str) -> str:
    """*texts* one after the other, at most `KEPT_HEAD` + `KEPT_TAIL` characters; of a longer whole it begins as *first*.

    The task stands at one of the ends (SSJF, section 3.1, keeps the last one).
    """
    kept, room = [], KEPT_HEAD + KEPT_TAIL
    for text in reversed(texts):
        if text:
            kept.append(text[-room:])
            room -= len(kept[-1]) + 1
            if room <= 0:
                break
    whole = "\n".join(reversed(kept))
    return whole if room > 0 else first[:KEPT_HEAD] + "\n" + whole[-KEPT_TAIL:]


def read_turns(turns: Sequence[tuple[str, str]], first: str = "") -> tuple[str, Conversation]:
    """(text, what is known of the rest) of the *turns*, (role, text) each; *first* is the text of the conversation's first.

    Of turns without text (images, calls of tools) only the others count; without any the text is empty.
    """
    asked = next((text for _, text in reversed(turns) if text), "")
    system = answers = answered = last_answer = 0
    for role, said in turns[:-1]:
        if role == ASSISTANT and said:
            last_answer = len(said)
            answers, answered = answers + 1, answered + last_answer
        elif role in SYSTEM:
            system += len(said)
    if len(asked) > KEPT_TAIL:
        text = joined([asked], asked)
        own = len(text)
    else:
        text = joined([text for _, text in turns], first or asked)
        own = len(asked)
    return text, Conversation(own, system, answers, answered, last_answer)
