"""Public sets of prompts and answer lengths as samples: split by prompt, no prompt in two sets, always in the same order.

Tokens are counted without a tokenizer: by `count_tokens` where the text of the answer is available, else (alpaca_eval
gives only words and characters) by `TOKENS_A_WORD` and `TOKENS_A_CHARACTER`, both fitted to MiniLM's WordPiece tokens;
docs/papers/length-models.md has their errors. Each set stands for one tenant, named as its folder.

No set whose licence lets a fitted model be shipped has conversations, so `with_histories` makes them: earlier prompts
of the same source with the same model's answers stand before a prompt.
"""

import csv
import dataclasses
import gzip
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from forecasting.lengths.query import LengthQuery, Sample, joined, read_turns

PIECE: Final = re.compile(r"\w+|[^\w\s]")
TOKENS_A_PIECE: Final = 1.09
TOKENS_A_WORD: Final = 0.725
TOKENS_A_CHARACTER: Final = 0.086

TEST_SHARE: Final = 0.3
"""Share of prompts in the test, as in PreServe (section 5.2.2: 7 to 3)."""
UNSEEN_SHARE: Final = 0.1
"""Share of the prompts of the free sets that the bundled student does not learn from; a part of the test's."""
EVERY_NTH_MODEL: Final = 10
"""Of alpaca_eval's 227 models, by name, every tenth is read: 23 stand for the models that a fleet serves."""
DAVINCI: Final = "text-davinci-003"


class DataMissing(ValueError):
    """A set's file is missing or malformed; the message names it."""


class AnsweredPrompt(NamedTuple):
    """A prompt and a model's answer."""

    prompt: str
    model: str
    answer: str
    """Empty if the set has only its size."""
    tokens: int
    """Tokens of the answer."""
    source: str = ""
    """The part of the set it is from, if the sorts of prompts differ."""


@dataclass(frozen=True, slots=True)
class Split:
    """Samples of one or more sets; no prompt is in both parts."""

    training: list[Sample]
    test: list[Sample]


def count_tokens(text: str) -> int:
    """Estimate the tokens of *text* under a BERT WordPiece vocabulary: words and punctuation marks, times a constant."""
    return round(TOKENS_A_PIECE * len(PIECE.findall(text)))


def normalised(text: str) -> str:
    """Return *text* for comparison: in lower case, one blank between words, no punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataMissing(f"{path} is not there. Put the data sets below one folder and name that.") from error
    except (OSError, ValueError) as error:
        raise DataMissing(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield from file
    except FileNotFoundError as error:
        raise DataMissing(f"{path} is not there. Put the data sets below one folder and name that.") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataMissing(f"{path} cannot be read: {error}") from error


def alpaca_eval(folder: Path) -> Iterator[AnsweredPrompt]:
    """Yield answers of every tenth of 227 models to 600 prompts (CC BY-NC 4.0)."""
    prompts = {int(row["id"]): str(row["instruction"]) for row in _json(folder / "prompts.json")}
    rows = list(csv.DictReader(_lines(folder / "lengths.csv.gz")))
    served = set(sorted({row["model"] for row in rows})[::EVERY_NTH_MODEL])
    for row in rows:
        text = prompts.get(int(row["prompt_id"]))
        if text and row["model"] in served:
            tokens = TOKENS_A_WORD * int(row["words"]) + TOKENS_A_CHARACTER * int(row["chars"])
            yield AnsweredPrompt(text, row["model"], "", round(tokens))


def arena_bench_v1(folder: Path) -> Iterator[AnsweredPrompt]:
    """Yield answers of 19 models to 300 prompts of real users (Apache-2.0)."""
    for line in _lines(folder / "pairs.jsonl.gz"):
        row = json.loads(line)
        yield AnsweredPrompt(row["prompt"], row["model"], row["output"], count_tokens(row["output"]), "arena_bench_v1")


def stanford_alpaca_5k(folder: Path) -> Iterator[AnsweredPrompt]:
    """Yield 5,000 instructions answered by text-davinci-003 (CC BY-NC 4.0)."""
    yield from _instructions(folder / "alpaca_5000.json", DAVINCI)


def gpteacher(folder: Path) -> Iterator[AnsweredPrompt]:
    """Yield 10,819 role plays and tool calls answered by GPT-4 (MIT)."""
    for part in ("roleplay-simple-deduped-roleplay", "toolformer-dedupe-only"):
        yield from _instructions(folder / f"{part}-dataset.json", "gpt-4", part)


def codealpaca(folder: Path) -> Iterator[AnsweredPrompt]:
    """Yield 6,552 programming tasks (CC BY-NC 4.0); who answered the newer part is not stated."""
    yield from _instructions(folder / "code_alpaca_2k.json", DAVINCI)
    yield from _instructions(folder / "new_codealpaca.json", "codealpaca-new")


def _instructions(path: Path, model: str, source: str = "") -> Iterator[AnsweredPrompt]:
    for row in _json(path):
        text = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        yield AnsweredPrompt(text, model, row["output"], count_tokens(row["output"]), source)


SETS: Final[dict[str, Callable[[Path], Iterable[AnsweredPrompt]]]] = {
    read.__name__: read for read in (alpaca_eval, arena_bench_v1, stanford_alpaca_5k, gpteacher, codealpaca)
}
"""Readers by folder. A prompt in two sets belongs to the first."""

FREE: Final = ("arena_bench_v1", "gpteacher")
"""Sets whose licence allows a model fitted to them to be shipped."""


def in_test(text: str, share: float = TEST_SHARE) -> bool:
    """Return whether the prompt *text* belongs to the test: its normalised words alone decide."""
    digest = hashlib.sha256(normalised(text).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def read_sets(folder: Path, names: Iterable[str] = tuple(SETS), share: float = TEST_SHARE) -> Split:
    """Return the sets *names* in *folder*, without empty answers. Raises DataMissing; KeyError for an unknown name."""
    split = Split([], [])
    owner: dict[str, str] = {}
    for name in names:
        for each in SETS[name](folder / name):
            key = normalised(each.prompt)
            if not key or each.tokens < 1 or owner.setdefault(key, name) != name:
                continue
            query = LengthQuery(each.prompt, count_tokens(each.prompt), model=each.model, tenant=name)
            part = split.test if in_test(each.prompt, share) else split.training
            part.append(Sample(query, each.tokens))
    return split


def free_answers(folder: Path) -> list[AnsweredPrompt]:
    """Return answers of the sets `FREE`, without the prompts that are kept for the test. Raises DataMissing."""
    return [
        each
        for name in FREE
        for each in SETS[name](folder / name)
        if normalised(each.prompt) and each.tokens and not in_test(each.prompt, UNSEEN_SHARE)
    ]


def temperature_lengths(folder: Path) -> list[tuple[int, ...]]:
    """Return lengths of Vicuna-7B's answers to 20,000 prompts at temperatures 0.3, 0.5 and 0.7; capped at 512 tokens."""
    here = folder / "seqsched_lengths"
    rows = [row for part in ("train", "val") for row in _json(here / f"alpaca-{part}-10k-length.json")]
    return [tuple(int(row[f"L_t{heat}"]) for heat in ("0.3", "0.5", "0.7")) for row in rows]


def proxy_predictions(folder: Path) -> list[tuple[int, int]]:
    """Return (real tokens, class by a BERT of SSJF's authors) of 85,482 prompts of LMSYS-Chat-1M to Vicuna-13B."""
    path = folder / "proxy_lengths" / "predictions_warmup_multi_cls_1000K.csv.gz"
    return [
        (int(float(row["output_token_length"])), int(float(row["predicted_length"])))
        for row in csv.DictReader(_lines(path))
    ]


SHARE: Final = 0.7
"""Synthetic samples for each real one."""
KINDS: Final = (("history", 0.65), ("system", 0.2), ("no text", 0.15))
MOST_PAIRS: Final = 12
ANOTHER_PAIR: Final = 0.7
WITH_SYSTEM: Final = 0.4
"""Share of histories with a system prompt."""
UNMARKED: Final = 0.35
"""Share of histories in which the last message is not marked."""
COUNTED_WRONG: Final = 0.15
"""Standard deviation of the logarithm of the prompt's tokens, which a gateway only estimates."""
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are a careful expert. Think before you answer, and say so when you do not know.",
    "You are a support agent of an online shop. Be polite, ask for the order number, and never promise a refund.",
    "You are a senior software engineer. Answer with working code and explain what is not obvious.",
    "You help students with their homework. Do not give the solution at once; lead them to it by questions.",
    "Answer in the language of the user. Today is Monday. The user is signed in and has a paid plan.",
)


def with_histories(pairs: Sequence[AnsweredPrompt]) -> list[Sample]:
    """Return a sample of each of *pairs* alone, and `SHARE` as many synthetic ones; names of tenants are hidden."""
    dice = random.Random(1)
    sources: dict[tuple[str, str], list[AnsweredPrompt]] = defaultdict(list)
    for pair in pairs:
        sources[pair.source, pair.model].append(pair)
    names, shares = [name for name, _ in KINDS], [share for _, share in KINDS]
    samples = []
    for pair in pairs:
        alone = LengthQuery(pair.prompt, count_tokens(pair.prompt), model=pair.model)
        if dice.random() < 0.5:  # as the gateway asks, which knows that this is one message of a chat
            alone = dataclasses.replace(alone, conversation=read_turns([("user", pair.prompt)])[1])
        samples.append(Sample(alone, pair.tokens))
        if dice.random() >= SHARE:
            continue
        kind = dice.choices(names, shares)[0]
        if kind == "no text":
            made = dataclasses.replace(alone, text="", conversation=None)
        else:
            made = _conversation(pair, sources[pair.source, pair.model], kind == "system", dice)
        counted = max(1, round(made.prompt_tokens * dice.lognormvariate(0.0, COUNTED_WRONG)))
        samples.append(Sample(dataclasses.replace(made, prompt_tokens=counted), pair.tokens))
    return samples


def _conversation(
    pair: AnsweredPrompt, others: Sequence[AnsweredPrompt], system: bool, dice: random.Random
) -> LengthQuery:
    turns: list[tuple[str, str]] = []
    if system or dice.random() < WITH_SYSTEM:
        turns.append(("system", dice.choice(SYSTEM_PROMPTS)))
        if dice.random() < 0.3:  # a long one
            turns[0] = ("system", turns[0][1] + "\n" + dice.choice(others).prompt)
    if not system:
        count = 1
        while count < MOST_PAIRS and dice.random() < ANOTHER_PAIR:
            count += 1
        for other in dice.choices(others, k=count):
            turns += [("user", other.prompt), ("assistant", other.answer)]
    turns.append(("user", pair.prompt))
    texts = [text for _, text in turns]
    tokens = sum(map(count_tokens, texts))
    if dice.random() < UNMARKED:
        return LengthQuery(joined(texts, texts[0]), tokens, model=pair.model, turns=len(turns))
    text, conversation = read_turns(turns, texts[0])
    return LengthQuery(text, tokens, model=pair.model, turns=len(turns), conversation=conversation)
