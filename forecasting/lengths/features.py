"""Features of a prompt for cheap length models: known n-grams and a few dozen measures, in tens of microseconds.

Of a conversation the last message is read, and of the others only their number and sizes count; where it is not known
which message is the last, all of the text. Of a long one the first `FIRST` and the last `LAST` characters are read,
since the task stands at one of its ends. Word n-grams are hashed, and those that a `Vocabulary` knows become the
numbers of its rows. A vocabulary holds what several prompts of its training had in common, so features that are kept
hold no name, no figure and no phrase that is a tenant's own, and neither the order nor the number of common words.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import kernels
from forecasting.lengths.query import LengthQuery

VERSION: Final = 2
HEAD: Final = 5
"""Numbers of two bytes before the measures in packed features."""
FIRST, LAST = 500, 2000
MOST_ROWS: Final = 65535

UNITS: Final = {
    "words": ("words", "word"),
    "sentences": ("sentence", "sentences", "lines", "line", "liner", "liners"),
    "paragraphs": ("paragraph", "paragraphs", "stanzas", "verses", "stanza", "page", "pages", "chapters", "scenes"),
    "items": (
        "items", "examples", "example", "ideas", "reasons", "steps", "points", "bullet", "bullets", "ways", "tips", "things",
        "questions", "facts", "names", "options", "titles", "suggestions", "types", "benefits", "adjectives", "synonyms",
    ),
    "characters": ("characters", "letters", "chars"),
    "tokens": ("tokens", "minutes", "minute"),
}  # fmt: skip
"""Units that a number before the word counts."""

CATEGORIES: Final = {
    "brief": ("brief", "briefly", "short", "concise", "concisely", "succinct", "quick", "quickly", "only", "just", "simple",
              "tldr", "shortly", "abbreviated"),
    "long": ("detailed", "detail", "details", "comprehensive", "depth", "thorough", "extensive", "elaborate", "long",
             "complete", "full", "everything", "exhaustive", "lengthy"),
    "prose": ("essay", "article", "blog", "story", "report", "paper", "novel", "letter", "speech", "script", "poem", "song",
              "email", "dialogue", "monologue", "chapter", "scene", "post", "narrative", "guide", "tutorial", "lyrics"),
    "list": ("list", "lists", "enumerate", "outline", "suggest", "recommend", "brainstorm", "itinerary"),
    "code": ("code", "function", "program", "implement", "python", "javascript", "java", "sql", "html", "css", "script",
             "class", "algorithm", "react", "php", "api", "regex", "query", "bash", "method"),
    "rework": ("translate", "rewrite", "edit", "correct", "paraphrase", "convert", "summarize", "rephrase", "replace",
               "reword", "fix", "proofread", "transform", "summary", "simplify", "modify"),
    "choose": ("classify", "categorize", "identify", "determine", "choose", "select", "which", "true", "false", "yes", "no",
               "whether", "detect", "extract", "find", "calculate", "output", "label", "correctly", "compute", "solve"),
    "explain": ("explain", "describe", "discuss", "compare", "analyze", "contrast", "evaluate", "explanation", "why", "how"),
    "ask": ("what", "who", "when", "where", "is", "are", "does", "did", "can", "was"),
    "format": ("json", "table", "csv", "xml", "markdown", "yaml", "format", "template"),
    "make": ("plan", "design", "develop", "create", "generate", "write", "compose", "construct", "build", "make", "draft"),
    "role": ("imagine", "pretend", "act", "roleplay", "you", "character", "assistant", "expert"),
    "give": ("give", "name", "provide", "tell", "state", "define", "show"),
    "tool": ("toolformer", "tool", "tools", "function", "search", "wikipedia", "calculator"),
}  # fmt: skip

NUMBERS: Final = {
    "a": 1.0, "an": 1.0, "one": 1.0, "single": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0,
    "seven": 7.0, "eight": 8.0, "nine": 9.0, "ten": 10.0, "twelve": 12.0, "twenty": 20.0, "hundred": 100.0,
    "thousand": 1000.0,
}  # fmt: skip

MEASURES: Final = (
    "log_characters", "log_prompt_tokens", "log_turns", "has_text", "log_words", "log_sentences", "log_questions",
    "log_lines", "log_fences", "log_quotes", "log_list_lines",
    "digits", "upper", "foreign", "punctuation", "code_marks", "word_length",
    "ends_asking", "ends_colon", *(f"asked_{name}" for name in UNITS), *(f"says_{name}" for name in CATEGORIES),
    "log_tools", "knows_conversation", "log_system", "log_answers", "log_mean_answer", "log_last_answer",
)  # fmt: skip
"""Names of the measures, in their order."""
NOT_OF_TEXT: Final = MEASURES.index("log_tools")
"""Index of the first measure that is not of the text."""


def word_hash(word: str) -> int:
    """Return the FNV-1a hash of 32 bits over lower-case bytes, as the kernel hashes one word."""
    code = kernels.SEED
    for byte in word.lower().encode():
        code = ((code ^ byte) * kernels.PRIME) & kernels.MASK
    return code


def _known_words() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    known: dict[int, tuple[int, float]] = {}
    for kind, words in enumerate((*UNITS.values(), *CATEGORIES.values())):
        for word in words:
            known.setdefault(word_hash(word), (kind, 0.0))
    for word, value in NUMBERS.items():
        known.setdefault(word_hash(word), (len(UNITS) + len(CATEGORIES), value))
    hashes = sorted(known)
    kinds, values = zip(*(known[each] for each in hashes), strict=True)
    return np.array(hashes, np.int64), np.array(kinds, np.int64), np.array(values)


HASHES, KINDS, VALUES = _known_words()
COUNTED: Final = [
    kernels.WORDS, kernels.SENTENCES, kernels.QUESTIONS, kernels.LINES, kernels.FENCES, kernels.QUOTES, kernels.LIST_LINES,
]  # fmt: skip
SHARES: Final = [kernels.DIGITS, kernels.UPPER, kernels.FOREIGN, kernels.PUNCTUATION, kernels.CODE_MARKS]


class Prompt(NamedTuple):
    """N-grams and measures of a text, before any vocabulary."""

    measures: NDArray[np.float32]
    """One value for each name in `MEASURES`, already rounded to the precision of `packed`."""
    hashes: NDArray[np.int64]
    """Hashes of all n-grams, in their order."""
    opening: NDArray[np.int64]
    """Hashes of the n-grams in the first `kernels.OPENING` tokens, hashed separately."""


class Features(NamedTuple):
    """The features of one prompt under one vocabulary."""

    measures: NDArray[np.float32]
    ids: NDArray[np.int32]
    """Rows of the vocabulary for its n-grams, ascending, each once."""
    opening: NDArray[np.int32]
    """As `ids`, for the opening."""


class Vocabulary:
    """The n-grams that a model knows, by their hashes: ascending, each once, at most 65,535."""

    def __init__(self, hashes: NDArray[np.int64]) -> None:
        self.hashes = np.ascontiguousarray(hashes, np.int64)
        if len(self.hashes) > MOST_ROWS:
            raise ValueError(f"A vocabulary has at most {MOST_ROWS:,} n-grams, not {len(self.hashes):,}.")
        self.fingerprint = zlib.crc32(self.hashes.astype("<u4").tobytes())
        places = 1 << max(4, (2 * len(self.hashes)).bit_length())
        self._keys, self._rows = np.full(places, -1, np.int64), np.zeros(places, np.int32)
        kernels.place_hashes(self.hashes, self._keys, self._rows)

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def common(cls, prompts: Iterable[Prompt], least: int, most: int) -> Self:
        """Return the n-grams that at least *least* of *prompts* have; the *most* frequent if too many."""
        by_prompt = [np.unique(np.concatenate([prompt.hashes, prompt.opening])) for prompt in prompts]
        hashes, counts = np.unique(
            np.concatenate(by_prompt) if by_prompt else np.zeros(0, np.int64), return_counts=True
        )
        order = np.lexsort((hashes, -counts))[: min(most, int((counts >= least).sum()))]
        return cls(np.sort(hashes[order]))

    def features(self, prompt: Prompt) -> Features:
        return Features(prompt.measures, self._known_rows(prompt.hashes), self._known_rows(prompt.opening))

    def _known_rows(self, hashes: NDArray[np.int64]) -> NDArray[np.int32]:
        rows = np.empty(len(hashes), np.int32)
        count = kernels.look_up(hashes, self._keys, self._rows, np.zeros(len(self.hashes) + 1, np.uint8), rows)
        return np.sort(rows[:count])


def read(text: str) -> str:
    """Return the part of *text* that is read: its beginning and its end."""
    if len(text) <= FIRST + LAST:
        return text
    return f"{text[:FIRST]}\n{text[-LAST:]}"


def extract(query: LengthQuery) -> Prompt:
    """Return n-grams and measures of *query*'s prompt; model, tenant and limits are not included."""
    part = read(query.asked)
    data = np.frombuffer(part.encode("utf-8", "replace"), np.uint8)
    hashes = np.empty(kernels.MOST_HASHES, np.int64)
    opening = np.empty(kernels.MOST_OPENING_HASHES, np.int64)
    counts = np.zeros(kernels.COUNTS)
    demands = np.zeros(len(UNITS))
    categories = np.zeros(len(CATEGORIES))
    hash_count, opening_count = kernels.read_bytes(
        data, HASHES, KINDS, VALUES, len(UNITS), len(CATEGORIES), hashes, opening, counts, demands, categories
    )
    return Prompt(measures(query, len(data), counts, demands, categories), hashes[:hash_count], opening[:opening_count])


def measures(
    query: LengthQuery,
    size: int,
    counts: NDArray[np.float64],
    demands: NDArray[np.float64],
    categories: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Return the values of `MEASURES` from what was counted in *size* bytes."""
    words = counts[kernels.WORDS]
    values = np.empty(len(MEASURES))
    values[0] = len(query.asked)
    values[1] = max(query.prompt_tokens, 0)
    values[2] = max(query.turns, 0)
    values[3] = 1.0 if size else 0.0
    values[4:11] = counts[COUNTED]
    values[11:16] = counts[SHARES]
    values[11:16] /= max(size, 1)
    values[16] = 0.1 * counts[kernels.LETTERS] / words if words else 0.0
    values[17] = counts[kernels.ENDS_ASKING]
    values[18] = counts[kernels.ENDS_COLON]
    values[19 : 19 + len(UNITS)] = demands
    values[19 + len(UNITS) : NOT_OF_TEXT] = categories
    values[NOT_OF_TEXT:] = 0.0
    values[NOT_OF_TEXT] = max(query.tools, 0)
    if query.conversation is not None:
        rest = query.conversation
        mean = rest.answered_characters / max(rest.answers, 1)
        values[NOT_OF_TEXT + 1 :] = (1.0, rest.system_characters, rest.answers, mean, rest.last_answer_characters)
    for part in (slice(0, 3), slice(4, 11), slice(19, 19 + len(UNITS)), NOT_OF_TEXT, slice(NOT_OF_TEXT + 2, None)):
        values[part] = np.log1p(values[part])
    return values.astype(np.float16).astype(np.float32)


def packed(features: Features, fingerprint: int) -> bytes:
    """Return *features* under the vocabulary with this *fingerprint* as bytes: two for each known n-gram."""
    head = np.array(
        [VERSION, len(features.measures), len(features.opening), fingerprint & 0xFFFF, fingerprint >> 16], "<u2"
    )
    ids = np.concatenate([features.opening, features.ids]).astype("<u2")
    return head.tobytes() + features.measures.astype("<f2").tobytes() + ids.tobytes()


def unpacked(data: bytes, vocabulary: Vocabulary) -> Features:
    """Return features from bytes of `packed`. Raises ValueError for other bytes, and for another version or vocabulary."""
    if len(data) < 2 * HEAD or len(data) % 2:
        raise ValueError("These bytes hold no features of a prompt.")
    version, width, opening, low, high = (int(value) for value in np.frombuffer(data, "<u2", HEAD))
    if version != VERSION or width != len(MEASURES):
        raise ValueError(f"Features of version {version}, this version reads {VERSION}.")
    if low + (high << 16) != vocabulary.fingerprint:
        raise ValueError("These features were taken with another vocabulary than this model's.")
    start = 2 * (HEAD + width)
    if len(data) < start + 2 * opening:
        raise ValueError("These bytes hold no features of a prompt: they end too early.")
    ids = np.frombuffer(data, "<u2", offset=start).astype(np.int32)
    if len(ids) and ids.max() >= len(vocabulary):
        raise ValueError("These bytes hold no features of a prompt: a row is beyond the vocabulary.")
    return Features(np.frombuffer(data, "<f2", width, 2 * HEAD).astype(np.float32), ids[opening:], ids[:opening])


def measure_matrix(rows: Sequence[Prompt | Features]) -> NDArray[np.float32]:
    """Return the measures of n prompts, (n, measures)."""
    return np.stack([each.measures for each in rows])
