"""Features of a prompt for cheap length models: a few dozen measures and hashed n-grams, in tens of microseconds.

Of a conversation the last message is read, and of the others only their number and sizes count; where it is not known
which message is the last, all of the text. Of a long one the first `FIRST` and the last `LAST` characters are read,
since the task is at one of its ends. `TextScore` sums what its n-grams say of a prompt's length into one figure. Features
that are kept are the measures and that figure: no text, no name and no number of a tenant can be read off.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import kernels
from forecasting.lengths.query import LengthQuery

VERSION: Final = 3
HEAD: Final = struct.Struct("<HI")
"""Version and fingerprint of the text score, before the features in packed ones."""
FIRST, LAST = 500, 2000

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
    """Measures and n-grams of a text."""

    measures: NDArray[np.float32]
    """One value for each name in `MEASURES`, already rounded to the precision of `packed`."""
    hashes: NDArray[np.int64]
    """Hashes of its n-grams; those of the first `kernels.OPENING` tokens also under a separate role."""


BUCKETS: Final = 1 << 15
DAMPING: Final = 3.0
"""Penalty on squared weights."""
ITERATIONS: Final = 60
FOLDS: Final = 5


class TextScore:
    """Sum of weights of a prompt's n-grams, hashed into `BUCKETS`: its expected log-length above the usual one."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self.weights = weights.astype(np.float16).astype(np.float32)
        self.fingerprint = zlib.crc32(self.weights.tobytes())

    def __call__(self, prompt: Prompt) -> float:
        buckets = np.unique(prompt.hashes % BUCKETS)
        return float(self.weights[buckets].sum() / np.sqrt(max(len(buckets), 1)))

    @classmethod
    def fit(
        cls, prompts: Sequence[Prompt], target: NDArray[np.float64], folds: NDArray[np.int64]
    ) -> tuple["TextScore", NDArray[np.float64]]:
        """Return the ridge regression of *target* on the n-grams of *prompts*, and the score of each by other folds."""
        from scipy.sparse import csr_array
        from scipy.sparse.linalg import lsqr

        buckets = [np.unique(prompt.hashes % BUCKETS) for prompt in prompts]
        counts = np.array([len(row) for row in buckets])
        values = np.repeat(1.0 / np.sqrt(np.maximum(counts, 1)), counts)
        ends = np.concatenate([[0], np.cumsum(counts)])
        bags: Any = csr_array((values, np.concatenate(buckets), ends), shape=(len(prompts), BUCKETS))

        def weights(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
            return np.asarray(lsqr(bags[chosen], target[chosen], damp=np.sqrt(DAMPING), iter_lim=ITERATIONS)[0])

        scores = np.zeros(len(target))
        for fold in range(FOLDS):
            held_out = folds == fold
            if held_out.any() and not held_out.all():
                scores[held_out] = bags[held_out] @ weights(~held_out)
        return cls(weights(np.ones(len(target), bool)).astype(np.float32)), scores


def read(text: str) -> str:
    """Return the part of *text* that is read: its beginning and its end."""
    if len(text) <= FIRST + LAST:
        return text
    return f"{text[:FIRST]}\n{text[-LAST:]}"


def extract(query: LengthQuery) -> Prompt:
    """Return measures and n-grams of *query*'s prompt; model, tenant and limits are not included."""
    part = read(query.asked)
    data = np.frombuffer(part.encode("utf-8", "replace"), np.uint8)
    hashes = np.empty(kernels.MAX_HASHES, np.int64)
    counts = np.zeros(kernels.COUNTS)
    demands = np.zeros(len(UNITS))
    categories = np.zeros(len(CATEGORIES))
    count = kernels.read_bytes(
        data, HASHES, KINDS, VALUES, len(UNITS), len(CATEGORIES), hashes, counts, demands, categories
    )
    return Prompt(measures(query, len(data), counts, demands, categories), hashes[:count])


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


def features(prompt: Prompt, score: TextScore) -> NDArray[np.float32]:
    """Return the measures of *prompt*, then its score."""
    return np.append(prompt.measures, np.float32(np.float16(score(prompt))))


def packed(row: NDArray[np.float32], score: TextScore) -> bytes:
    """Return *row*, of `features` with *score*, as bytes: two for each figure."""
    return HEAD.pack(VERSION, score.fingerprint) + row.astype("<f2").tobytes()


def unpacked(data: bytes, score: TextScore) -> NDArray[np.float32]:
    """Return features from bytes of `packed`. Raises ValueError for other bytes, another version or another score."""
    if len(data) < HEAD.size:
        raise ValueError("These bytes hold no features of a prompt.")
    version, fingerprint = HEAD.unpack_from(data)
    if version != VERSION or len(data) != HEAD.size + 2 * (len(MEASURES) + 1):
        raise ValueError(f"Features of version {version}, this version reads {VERSION}.")
    if fingerprint != score.fingerprint:
        raise ValueError("These features have another text score than this model's.")
    return np.frombuffer(data, "<f2", offset=HEAD.size).astype(np.float32)
