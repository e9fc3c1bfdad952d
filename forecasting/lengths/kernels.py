"""Kernel of prompt features: hashed n-grams and counts, in one pass over a prompt's bytes.

`tests/oracles/text_features.py` is its plain twin.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.compiled import compiled

OPENING: Final = 16
"""Tokens at the start whose n-grams count separately: the verb that states the task is there."""
MAX_HASHES: Final = 1536

# Columns of `counts`.
(
    WORDS, SENTENCES, QUESTIONS, LINES, FENCES, DIGITS, UPPER, FOREIGN, PUNCTUATION, QUOTES, LIST_LINES, LETTERS,
    ENDS_ASKING, ENDS_COLON, CODE_MARKS,
) = range(15)  # fmt: skip
COUNTS: Final = 15

SEED: Final = 2166136261
PRIME: Final = 16777619
MASK: Final = 0xFFFFFFFF
ROLE_BIGRAM: Final = 0x9E3779B1
ROLE_PREFIX: Final = 0x85EBCA6B
ROLE_OPENING: Final = 0xC2B2AE35
ROLE_TRIGRAM: Final = 0x27D4EB2F
PREFIX_LETTERS: Final = 4
LONG_WORD: Final = 6
LONG_NUMBER: Final = 4
NEAR: Final = 3  # tokens between a number and what it counts: "two short funny paragraphs"
MOST_COUNTED: Final = 20000.0


@compiled
def read_bytes(
    data: NDArray[np.uint8],
    word_hashes: NDArray[np.int64],
    word_kinds: NDArray[np.int64],
    word_values: NDArray[np.float64],
    units: int,
    categories: int,
    hashes: NDArray[np.int64],
    counts: NDArray[np.float64],
    demands: NDArray[np.float64],
    category_values: NDArray[np.float64],
) -> int:
    """Fill the outputs from UTF-8 *data*; return how many of *hashes* were set.

    *word_hashes* (sorted), *word_kinds* and *word_values* are the known words: kinds below *units* are units that a
    number may ask for ("words"), the next *categories* are categories, and the last kind is a number word with its
    value. *demands* (units) becomes the number asked for, *category_values* (categories) 1 in the opening, 0.5 later,
    else 0.
    """
    count = token = 0
    previous = before = SEED
    number = 0.0
    number_at = -100
    line_start = True
    size = len(data)
    at = 0
    while at < size:
        byte = data[at]
        if byte <= 32:
            if byte == 10:
                counts[LINES] += 1.0
                line_start = True
            at += 1
            continue
        begin = at
        code: Any = SEED
        prefix: Any = 0
        value = 0.0
        is_word = is_number = False
        if byte >= 128 or 65 <= byte <= 90 or 97 <= byte <= 122:
            is_word = True
            while at < size:
                byte = data[at]
                if 65 <= byte <= 90:
                    counts[UPPER] += 1.0
                    byte += 32
                elif byte >= 128:
                    counts[FOREIGN] += 1.0
                elif not 97 <= byte <= 122:
                    break
                code = ((code ^ np.int64(byte)) * PRIME) & MASK
                at += 1
                if at - begin == PREFIX_LETTERS:
                    prefix = code
            counts[WORDS] += 1.0
            counts[LETTERS] += at - begin
        elif 48 <= byte <= 57:
            is_number = True
            while at < size and 48 <= data[at] <= 57:
                if at - begin < LONG_NUMBER:
                    code = ((code ^ np.int64(data[at])) * PRIME) & MASK
                value = min(10.0 * value + (data[at] - 48), MOST_COUNTED)
                at += 1
            if at - begin > LONG_NUMBER:
                code = ((SEED ^ (at - begin)) * PRIME) & MASK
            counts[DIGITS] += at - begin
            if line_start and at < size and (data[at] == 46 or data[at] == 41):
                counts[LIST_LINES] += 1.0
        else:
            code = ((code ^ np.int64(byte)) * PRIME) & MASK
            counts[PUNCTUATION] += 1.0
            followed = at + 1 >= size or data[at + 1] <= 32
            if byte == 63:
                counts[QUESTIONS] += 1.0
            if followed and byte in (46, 63, 33):
                counts[SENTENCES] += 1.0
            elif byte in (34, 39):
                counts[QUOTES] += 1.0
            elif byte == 96 and at + 2 < size and data[at + 1] == 96 and data[at + 2] == 96:
                counts[FENCES] += 1.0
                at += 2
            elif line_start and followed and byte in (45, 42):
                counts[LIST_LINES] += 1.0
            elif byte in (123, 125, 59, 61, 60, 62, 40, 41, 91, 93):
                counts[CODE_MARKS] += 1.0
            at += 1
        line_start = False

        if is_word:
            low, high = 0, len(word_hashes)
            while low < high:
                middle = (low + high) // 2
                if word_hashes[middle] < code:
                    low = middle + 1
                else:
                    high = middle
            if low < len(word_hashes) and word_hashes[low] == code:
                kind = word_kinds[low]
                if kind >= units + categories:
                    is_number, value = True, word_values[low]
                elif kind >= units:
                    category_values[kind - units] = max(category_values[kind - units], 1.0 if token < OPENING else 0.5)
                elif token - number_at <= NEAR:
                    demands[kind] = max(demands[kind], number)
        if is_number:
            number, number_at = value, token

        bigram = ((((code ^ ROLE_BIGRAM) * PRIME) & MASK) ^ previous) * PRIME & MASK
        for role in range(3):
            if role == 0:
                full = code
            elif role == 1:
                full = bigram
            elif is_word and at - begin > LONG_WORD:
                full = ((prefix ^ ROLE_PREFIX) * PRIME) & MASK
            else:
                continue
            if count < len(hashes):
                hashes[count] = full
                count += 1
        if token < OPENING:
            trigram = ((((bigram ^ ROLE_TRIGRAM) * PRIME) & MASK) ^ before) * PRIME & MASK
            for role in range(3):
                full = code if role == 0 else (bigram if role == 1 else trigram)
                if count < len(hashes):
                    hashes[count] = ((full ^ ROLE_OPENING) * PRIME) & MASK
                    count += 1
        before, previous = previous, code
        token += 1
    last = size - 1
    while last >= 0 and data[last] <= 32:
        last -= 1
    if last >= 0:
        counts[ENDS_ASKING] = 1.0 if data[last] == 63 else 0.0
        counts[ENDS_COLON] = 1.0 if data[last] == 58 else 0.0
    return count
