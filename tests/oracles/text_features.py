"""Plain Python twins of the text feature `kernels`."""

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import kernels
from forecasting.lengths.features import CATEGORIES, HASHES, KINDS, UNITS, VALUES

TOKEN: Final = re.compile(rb"[A-Za-z\x80-\xff]+|[0-9]+|```|[^\x00-\x20]")


def mixed(first: int, second: int) -> int:
    return ((first ^ second) * kernels.PRIME) & kernels.MASK


def hashed(data: bytes) -> int:
    code = kernels.SEED
    for byte in data:
        code = mixed(code, byte)
    return code


def read_bytes(data: bytes) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return (hashes, counts, demands, categories) of UTF-8 *data*, as `kernels.read_bytes` fills them."""
    counts, demands, categories = np.zeros(kernels.COUNTS), np.zeros(len(UNITS)), np.zeros(len(CATEGORIES))
    counts[kernels.LINES] = data.count(b"\n")
    known = {int(code): (int(kind), float(value)) for code, kind, value in zip(HASHES, KINDS, VALUES, strict=True)}
    hashes: list[int] = []
    codes = [kernels.SEED, kernels.SEED]
    number, number_at = 0.0, -100
    for token, match in enumerate(TOKEN.finditer(data)):
        word = match.group()
        before_it = data[: match.start()].rsplit(b"\n", 1)[-1]
        line_start = not before_it.strip(bytes(range(33)))
        after = data[match.end() : match.end() + 1]
        followed = not after or after[0] <= 32
        is_word = word[:1].isalpha() or word[0] >= 128
        value: float | None = None
        if is_word:
            code = hashed(word.lower())
            counts[kernels.WORDS] += 1
            counts[kernels.LETTERS] += len(word)
            counts[kernels.UPPER] += sum(65 <= byte <= 90 for byte in word)
            counts[kernels.FOREIGN] += sum(byte >= 128 for byte in word)
            if code in known:
                kind, said = known[code]
                if kind >= len(UNITS) + len(CATEGORIES):
                    value = said
                elif kind >= len(UNITS):
                    place = kind - len(UNITS)
                    categories[place] = max(categories[place], 1.0 if token < kernels.OPENING else 0.5)
                elif token - number_at <= kernels.NEAR:
                    demands[kind] = max(demands[kind], number)
        elif word.isdigit():
            code = mixed(kernels.SEED, len(word)) if len(word) > kernels.LONG_NUMBER else hashed(word)
            value = min(float(word), kernels.MOST_COUNTED)
            counts[kernels.DIGITS] += len(word)
            counts[kernels.LIST_LINES] += line_start and after in (b".", b")")
        else:
            code = hashed(word[:1])
            counts[kernels.PUNCTUATION] += 1
            counts[kernels.QUESTIONS] += word == b"?"
            if followed and word in (b".", b"?", b"!"):
                counts[kernels.SENTENCES] += 1
            counts[kernels.QUOTES] += word in (b'"', b"'")
            counts[kernels.FENCES] += word == b"```"
            counts[kernels.LIST_LINES] += line_start and followed and word in (b"-", b"*")
            counts[kernels.CODE_MARKS] += word in (b"{", b"}", b";", b"=", b"<", b">", b"(", b")", b"[", b"]")
        if value is not None:
            number, number_at = value, token

        bigram = mixed(mixed(code, kernels.ROLE_BIGRAM), codes[-1])
        hashes += [code, bigram]
        if is_word and len(word) > kernels.LONG_WORD:
            hashes.append(mixed(hashed(word.lower()[: kernels.PREFIX_LETTERS]), kernels.ROLE_PREFIX))
        if token < kernels.OPENING:
            trigram = mixed(mixed(bigram, kernels.ROLE_TRIGRAM), codes[-2])
            hashes += [mixed(each, kernels.ROLE_OPENING) for each in (code, bigram, trigram)]
        codes.append(code)
    last = data.rstrip(bytes(range(33)))[-1:]
    counts[kernels.ENDS_ASKING], counts[kernels.ENDS_COLON] = last == b"?", last == b":"
    return hashes[: kernels.MAX_HASHES], counts, demands, categories
