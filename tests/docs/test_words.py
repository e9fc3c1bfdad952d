"""The words of `docs/glossary.md`: none that it calls old is left in names, comments, docstrings, pages or documents."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/glossary.md"
ROW = re.compile(r"^\| [^|]+ \|[^|]+\|[^|]*\| ?([^|]*)\|$", re.MULTILINE)
OLD = re.compile(r"`([^`]+)`( \(name\))?")
TEMPLATES = sorted(ROOT.glob("templates/**/*.html"))
TEXT_FILES = {".html", ".js", ".css", ".py"}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

EXCEPTIONS = {
    "forecasting/lengths": {"turn", "turns"},  # of a conversation
    "controlplane/gateway/admission": {"turn", "turns"},
    "controlplane/gateway/serving/prefixes.py": {"turn", "turns"},
    "controlplane/gateway/upstream/continuation.py": {"turn", "turns"},
    "controlplane/gateway/lengths/prediction.py": {"turns"},
    "tests/gateway/test_responses.py": {"turns"},
    "tests/gateway/test_marks.py": {"turns"},
    "tests/gateway/test_as_vllm_takes.py": {"turns"},
    "scheduling/simulation/workload/traces.py": {"turn", "turns"},
    "workers/traffic/replay.py": {"turn", "turns"},
    "tests/traffic": {"turn", "turns"},
    "tests/bench/_soak/mix.py": {"turn"},
    "tests/forecasting/lengths": {"turn", "turns"},
    "tests/clients/talker.py": {"turn"},  # its chat template is of this form, too
    "workers/vllm/tiny_model.py": {"turn"},  # `<|turn|>` of its chat template
    "controlplane/lengths": {"turns"},
    "controlplane/experiments/shipped_lengths.py": {"turn", "turns"},
    "tests/lengths": {"turns"},
    "tests/experiments/test_shipped_lengths.py": {"turn", "turns"},
    "docs/papers/lengths.md": {"turns"},
    "docs/papers/length-models.md": {"turns"},
    "scheduling/compiled.py": {"home"},  # `Path.home`
    "docs/operate/operations.md": {"house"},  # a prompt
    "docs/glossary.md": None,  # it has to name them
    "tests/docs/test_words.py": None,
}
"""Where an old word is the right one; None for every word."""


def old_words() -> tuple[set[str], set[str]]:
    """(words that are nowhere right, words that are no names), of the glossary's last column."""
    anywhere, names = set(), set()
    for cell in ROW.findall(GLOSSARY.read_text()):
        for word, name_only in OLD.findall(cell):
            (names if name_only else anywhere).add(word)
    return anywhere, names


ANYWHERE, NAMES = old_words()
PARTS = [{word.lower() for word in WORD.findall(old)} for old in ANYWHERE | NAMES]
TEXT = re.compile(rf"\b({'|'.join(sorted(ANYWHERE))})\b", re.IGNORECASE)


def in_text(text: str) -> set[str]:
    """Old words in prose, and in the snake_case and CamelCase names within it."""
    separated = " ".join(WORD.findall(re.sub(r"[_\W]+", " ", text))).lower()
    return {match.lower() for match in (*TEXT.findall(text), *TEXT.findall(separated))}


def in_name(name: str) -> set[str]:
    """Old words that *name* is made of; of those that are only no names, the name as a whole."""
    words = {word.lower() for word in WORD.findall(name)}
    return (words & ANYWHERE) | ({name.strip("_").lower()} & NAMES)


def suspicious(source: str) -> bool:
    """Whether *source* has all parts of an old word somewhere: only then it is read token by token."""
    words = {word.lower() for word in set(WORD.findall(source))}
    return any(parts <= words for parts in PARTS)


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, old word) of names, comments and docstrings, not of other strings."""
    statement_begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        words: set[str] = set()
        if token.type == tokenize.NAME:
            words = in_name(token.string)
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and statement_begins):
            words = in_text(token.string)
        yield from ((token.start[0], word) for word in sorted(words))
        if token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            statement_begins = True
        elif token.type not in {tokenize.NL, tokenize.COMMENT, tokenize.ENCODING}:
            statement_begins = False


def in_document(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, word) for word in sorted(in_text(line)))


def under(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def excepted(path: str, word: str) -> bool:
    return any(under(path, [place]) and (words is None or word in words) for place, words in EXCEPTIONS.items())


def test_code_has_no_old_word() -> None:
    wrong = []
    tops = ("controlplane", "workers", "scheduling", "forecasting", "tests")
    for path in (path for top in tops for path in sorted((ROOT / top).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        if not suspicious(source := path.read_text()):
            continue
        wrong += [f"{name}:{line}: {word}" for line, word in in_python(source) if not excepted(name, word)]
    assert not wrong, "\n".join(wrong)


ODD = re.compile(
    r"\b(whoever|somebody|nobody|of (?:its|their) own(?! \w)|goe?s? on|how far|anew|beside|the begin|reckon\w*"
    r"|righted|yardsticks?)\b",
    re.IGNORECASE,
)
"""Words that a native engineer stumbles over."""
ODD_NAMES = re.compile(rf"{ODD.pattern}|\b(gone on|said to be|once in a while)\b", re.IGNORECASE)
PRODUCT = ("controlplane", "scheduling", "forecasting", "workers")
ODD_LEFT = {
    "controlplane/fleet/models/hardware.py": 1,  # help texts: a migration would change them
    "controlplane/fleet/models/instances.py": 3,
    "controlplane/gateway/models.py": 1,
    "controlplane/tuning/models.py": 1,
}
"""Odd words in a file that are still there; a count may only fall."""


def test_pages_say_it_in_plain_words() -> None:
    folders = ("templates", "static/console")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_FILES]
    assert len(files) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in ODD.finditer(line)
    ]
    assert not wrong, "\n".join(wrong)


def odd_words(source: str) -> Iterator[tuple[int, str]]:
    """(line, odd word) of comments, docstrings and other strings of Python."""
    if ODD.search(source) is None:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING}:
            for match in ODD.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, match.start()), match[0]


def test_code_says_it_in_plain_words() -> None:
    counts = {}
    wrong = []
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py") if "migrations" not in path.parts):
        name = str(path.relative_to(ROOT))
        words = list(odd_words(path.read_text()))
        if words:
            counts[name] = len(words)
        if len(words) > ODD_LEFT.get(name, 0):
            wrong += [f"{name}:{line}: {word}" for line, word in words]
    assert not wrong, "\n".join(wrong)
    fallen = {name: count for name, count in ODD_LEFT.items() if counts.get(name, 0) < count}
    assert not fallen, f"lower the counts of {fallen} in ODD_LEFT"


def test_names_of_tests_are_plain() -> None:
    defined = re.compile(r"^ *(?:async def|def|class) (\w+)", re.MULTILINE)
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in defined.findall(path.read_text())
        if ODD_NAMES.search(name.replace("_", " "))
    ]
    assert not wrong, "\n".join(wrong)


def test_odd_words_are_noticed() -> None:
    source = '"""Goes on\n    whoever asks."""\nvalue = 1  # of its own\nname = "of its own model"\n'
    assert list(odd_words(source)) == [(1, "Goes on"), (2, "whoever"), (3, "of its own")]


SPACED_PERCENT = re.compile(r"[\d}] %%?(?![a-z(%])|^ %$")
"""Percent is written 97.7%."""
TABLES = "controlplane/experiments"  # theirs are in reports that are kept


def messages(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of strings that people read: those that are no docstrings, and docstrings that REST and settings show."""
    shown = path.startswith("controlplane/api") or path == "controlplane/tunable.py"
    statement_begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and (shown or not statement_begins):
            yield token.start[0], token.string.strip("fr\"'")
        if token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            statement_begins = True
        elif token.type not in {tokenize.NL, tokenize.COMMENT, tokenize.ENCODING}:
            statement_begins = False


def test_percent_has_one_form() -> None:
    wrong = []
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            name, source = str(path.relative_to(ROOT)), path.read_text()
            if not under(name, [TABLES]) and " %" in source:
                wrong += [
                    f"{name}:{line}: {text}" for line, text in messages(name, source) if SPACED_PERCENT.search(text)
                ]
    for path in TEMPLATES:
        lines = enumerate(path.read_text().splitlines(), 1)
        wrong += [
            f"{path.relative_to(ROOT)}:{number}" for number, line in lines if re.search(r"(\d|\}\}) %(?!\})", line)
        ]
    assert not wrong, "\n".join(wrong)


DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_documents_and_templates_have_no_old_word() -> None:
    wrong = []
    for path in [*DOCUMENTS, *TEMPLATES]:
        name = str(path.relative_to(ROOT))
        wrong += [f"{name}:{line}: {word}" for line, word in in_document(path.read_text()) if not excepted(name, word)]
    assert not wrong, "\n".join(wrong)


def test_the_terms_name_code_that_exists() -> None:
    """Modules that the glossary names can be found by that name."""
    rows = re.findall(r"^\| [^|]+ \|[^|]+\|([^|]*)\|", GLOSSARY.read_text(), re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)", cell)}
    modules = {str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for top in ("controlplane", "scheduling",
               "forecasting", "workers") for path in (*(ROOT / top).rglob("*.py"), *(ROOT / top).rglob("*/"))}  # fmt: skip
    missing = {
        name
        for name in named
        if not any(re.search(rf"(^|\.){re.escape(part)}$", module) for module in modules
                   for part in (name, name.rpartition(".")[0]))
    }  # fmt: skip
    assert missing <= {"world.link", "world.run_state"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("turn_key = 1", ["turn"]),
        ("returns = turnover = 1", []),
        ("x = foo.RunningHouse()", ["house"]),
        ("found = 1", ["found"]),
        ("found_at = 1  # it was found", []),
        ('"""Whose turn it is."""', ["turn"]),
        ('x = "whose turn it is"', []),
        ("# nudge it", ["nudge"]),
        ("pilothouse = 1", []),
    ],
)
def test_what_counts_as_an_old_word(source: str, words: list[str]) -> None:
    assert [word for _, word in in_python(source + "\n")] == words
