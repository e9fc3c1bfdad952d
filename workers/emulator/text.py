"""A toy tokenizer, the words of the answers, and how long answers are. All of it is deterministic.

One token of an answer is one word. A prompt given as text counts four characters a token, which is near what real
tokenizers do with English; a prompt given as token ids counts exactly.
"""

import math
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist

CHARACTERS_PER_TOKEN = 4

PROSE = """
The watch begins quietly. The instruments agree with the chart, the engines turn evenly and the weather report promises
little wind until the evening. A good officer reads the gauges twice, writes the position in the log and compares it
with the plan made in port. Nothing has to be done at once, and that is the best time to think about what comes next.
Toward noon the traffic grows. Ships from the south ask for the same channel, and each of them has a reason to go first.
The answer is seldom to hurry. Slow the one that can wait, let the one with perishable cargo pass, keep enough water
under every keel, and say plainly how long the others will have to stay. People accept a delay that was announced much
more easily than a promise that was broken. In the afternoon one engine runs hot, so its share of the work is moved to
the others before it stops by itself. The log records when that happened, why it was decided, and what the load was
before and after. The owners will ask next week, and a short honest line is worth more than a long excuse. When the night
watch arrives the queue is short again. The officer explains what was seen, what was done and what is still uncertain,
then hands over the wheel. Tomorrow will look like today until it does not, and the difference is usually visible in the
numbers a little earlier than on the horizon.
"""
WORDS = tuple(PROSE.split())
# Every word with the blank before it, as it stands inside a JSON string.
PIECES = tuple(b" " + word.encode("ascii") for word in WORDS)
LENGTHS = tuple(len(piece) for piece in PIECES)
FIRST_ID = 1_000_000
"""First id of the words of answers, beyond usual prompts of ids."""
END_ID = 2
"""Id of the end of an answer, which has no text."""

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()


def count_tokens(text: str) -> int:
    """Return the tokens of *text*: one for each four characters or part of them."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def pieces_of(written: str) -> list[str]:
    """Return the tokens of a text that is no prose, and the end-of-sequence token, which has no text."""
    step = CHARACTERS_PER_TOKEN
    return [*(written[at : at + step] for at in range(0, len(written), step)), ""]


def words(offset: int, count: int) -> list[str]:
    """Return *count* words of the prose from word *offset* on, continuing at its beginning."""
    return [WORDS[(offset + i) % len(WORDS)] for i in range(count)]


def detokenize(token_ids: Sequence[int]) -> str:
    """Return a text for a prompt given as token ids, for `echo`."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)


def token_id(place: int) -> int:
    """Return the id of a word of an answer, by its place in the prose."""
    return FIRST_ID + place % len(WORDS)


def prompt_ids(data: bytes) -> list[int]:
    """Return ids for a prompt given as text: equal content gets equal ids."""
    step = CHARACTERS_PER_TOKEN
    return [zlib.crc32(data[at : at + step]) % FIRST_ID for at in range(0, len(data), step)]


def answered_before(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many words of an answer end a prompt of ids, and the place of the next."""
    count, following = 0, -1
    for token in reversed(token_ids):
        place = token - FIRST_ID
        if not 0 <= place < len(WORDS) or (count and (place + count) % len(WORDS) != (following - 1) % len(WORDS)):
            break
        if not count:
            following = (place + 1) % len(WORDS)
        count += 1
    return count, following


def mixed(seed: int, *parts: int) -> int:
    """Return a 64-bit number that looks random and depends on all arguments (SplitMix64's finaliser after each part)."""
    state = seed & _MASK
    for part in (*parts, 0):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def output_tokens(number: int, median_tokens: float, sigma: float) -> int:
    """Return an answer's length, at least 1: log-normal with the given median and shape, drawn by *number* (64 bits).

    Lengths of real answers have roughly that shape in the public traces.
    """
    uniform = ((number >> 11) + 0.5) / (1 << 53)
    return max(1, round(median_tokens * math.exp(sigma * _NORMAL.inv_cdf(uniform))))


def cut_at_stop(
    offset: int, count: int, stop: tuple[str, ...], min_tokens: int, include: bool
) -> tuple[list[str], str] | None:
    """Cut *count* words from *offset* on at a stop string; return the text token by token, and that string.

    As in vLLM, of the strings that are complete after more than *min_tokens* tokens the one that ends first wins, its own
    text is left out unless *include*, and nothing of it is sent before. None if no string occurs.
    """
    pieces = words(offset, count)
    pieces = [piece if number == 0 else " " + piece for number, piece in enumerate(pieces)]
    whole, ends = "", []
    for piece in pieces:
        whole += piece
        ends.append(len(whole))
    free = ends[min_tokens - 1] if 0 < min_tokens <= count else 0  # a string must end beyond
    best: tuple[int, int] | None = None  # (its end, its place in the list)
    for place, word in enumerate(stop):
        start = whole.find(word, max(0, free - len(word) + 1))
        if start >= 0 and (best is None or start + len(word) < best[0]):
            best = start + len(word), place
    if best is None or min_tokens >= count:
        return None
    word = stop[best[1]]
    start = best[0] - len(word)
    token = bisect_left(ends, best[0])
    limit = start + len(word) if include else start
    kept = []
    for number in range(token + 1):
        begin = ends[number - 1] if number else 0
        kept.append(whole[begin : min(ends[number], limit)] if begin < limit else "")
    return kept, word
