"""Lengths that prompts ask for, so that emulated answers can be predicted from prompts, as real ones can.

A prompt that says nothing of it, and every prompt given as token ids, is answered at the length of the instance's own
specification. Otherwise the instruction decides: a number of words that it names, the length of the text that is to be
transformed, or the kind of answer that it wants. Each prompt has its usual length around that, and each answer to it
differs a little, as in the public sets of repeated prompts.
"""

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

READ_CHARACTERS = 320
"""Characters read at either end of a prompt, where instructions stand."""
OF_PROMPT_SIGMA, OF_ANSWER_SIGMA = 0.28, 0.18
"""Shapes of two log-normal factors: one fixed for a prompt, one drawn for every answer."""
TRANSFORMED_SIGMA = 0.12

WORDS = re.compile(r"\b(?:in|about|around|roughly|exactly|at most|under) (\d{1,5}) words\b")
TRANSFORMATION = re.compile(r"\b(?:translate|rewrite|rephrase|correct|proofread)\b")
INSTRUCTIONS: tuple[tuple[re.Pattern[str], float], ...] = tuple(
    (re.compile(pattern), tokens)
    for pattern, tokens in (
        (r"yes or no|true or false|one word|\bclassify\b|\bsentiment\b", 4.0),
        (r"one sentence|one line|\bname the\b|\bhow many\b|\bwho (?:is|was)\b", 28.0),
        (r"\bsummari[sz]e\b|\bsummary\b|\bshorten\b", 110.0),
        (r"\blist\b|\bsteps\b|\bbullet points\b|\bextract\b", 170.0),
        (r"\b(?:python|sql|javascript) (?:function|script|query)\b|\bcode\b", 260.0),
        (r"\bexplain\b|\bdescribe\b|\bcompare\b|\bwhy\b", 320.0),
        (r"\bemail\b|\bletter\b", 210.0),
        (r"\bessay\b|\bstory\b|\breport\b|\bin detail\b", 780.0),
    )
)
"""Instructions, and the median tokens of their answers; the first match counts."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class RequestedLength:
    """The median length that a prompt asks for, in tokens, and the spread of prompts of its kind."""

    tokens: float
    sigma: float


def read(prompt: str, prompt_tokens: int) -> RequestedLength | None:
    """Return the length that *prompt* asks for; None if it asks for none."""
    ends = (prompt[:READ_CHARACTERS] + "\n" + prompt[READ_CHARACTERS:][-READ_CHARACTERS:]).lower()
    if named := WORDS.search(ends):
        return RequestedLength(max(1.0, float(named[1])), TRANSFORMED_SIGMA)
    if TRANSFORMATION.search(ends):
        return RequestedLength(float(prompt_tokens), TRANSFORMED_SIGMA)
    for pattern, tokens in INSTRUCTIONS:
        if pattern.search(ends):
            return RequestedLength(tokens, OF_PROMPT_SIGMA)
    return None


def draw(length: RequestedLength, of_prompt: int, of_answer: int) -> int:
    """Return the tokens of one answer, at least 1; *of_prompt* and *of_answer* are 64 random bits each."""
    spread = length.sigma * _normal(of_prompt) + OF_ANSWER_SIGMA * _normal(of_answer)
    return max(1, round(length.tokens * math.exp(spread)))


def _normal(number: int) -> float:
    return _NORMAL.inv_cdf(((number >> 11) + 0.5) / (1 << 53))
