"""What Python writes first and JavaScript keeps fresh is the same: numbers as text, and states after messages."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.console.formats import FORMATS, age, amount, duration
from controlplane.console.live import deltas
from tests.console.apply import apply
from tests.examples import costly

JS = Path(__file__).parent.parent.parent / "static/console/js"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not on PATH: the JavaScript twins are not compared here")


@pytest.fixture(scope="session")
def run_js(tmp_path_factory):
    """`run_js(program, data)`: what an ES module that imports the twins prints for *data*, as JSON."""
    folder = tmp_path_factory.mktemp("js")
    for name in ("apply", "format"):
        shutil.copy(JS / f"{name}.js", folder / f"{name}.mjs")

    def run(program: str, data: object) -> object:
        script = folder / "program.mjs"
        script.write_text(
            'import { readFileSync } from "node:fs";\n'
            'import { apply } from "./apply.mjs";\n'
            'import { FORMATS, age, duration } from "./format.mjs";\n'
            "const data = JSON.parse(readFileSync(0));\n"
            f"console.log(JSON.stringify({program}));\n"
        )
        done = subprocess.run(
            [NODE, script], input=json.dumps(data), capture_output=True, text=True, check=True, timeout=60
        )
        return json.loads(done.stdout)

    return run


cells = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["ready", "failed", ""]))


@st.composite
def states(draw, keys=("a", "b", "c", "d")):
    """A state with tiles and one more table of the same columns, whose rows come, go and change."""
    tables = {}
    for name in ("tiles", "instances"):
        rows = draw(st.lists(st.sampled_from(keys), unique=True, max_size=4))
        table = {"id": rows}
        for column in ("running", "status"):
            table[column] = draw(st.lists(cells, min_size=len(rows), max_size=len(rows)))
        tables[name] = table
    return {
        "ts": draw(st.integers(1, 10**6)),
        "source": draw(st.sampled_from(["live", "silent"])),
        "tables": tables,
        "attention": draw(st.sampled_from([None, {"items": [], "total": 0, "instances": 0}])),
    }


def follow(sequence: list[dict]) -> list[dict]:
    """The messages that a connection gets which sees the states of *sequence* one after another."""
    messages = [deltas.snapshot(sequence[0])]
    for before, after in itertools.pairwise(sequence):
        messages += [deltas.tick(after), deltas.delta(before, after)]
    return messages


@given(sequence=st.lists(states(), min_size=1, max_size=5))
def test_states_follow_messages(sequence):
    state = None
    for message in follow(sequence):
        state = apply(state, json.loads(json.dumps(message)))
    assert state == sequence[-1]


@given(before=states(), after=states())
def test_applying_changes_nothing_it_was_given(before, after):
    copy = json.dumps([before, after])
    apply(apply(before, deltas.tick(after)), deltas.delta(before, after))
    assert json.dumps([before, after]) == copy


def test_a_delta_holds_only_what_changed():
    before = {"id": [1, 2, 3], "running": [5, 5, 5], "model": ["m", "m", "m"]}
    after = {"id": [1, 2, 3], "running": [5, 6, 5], "model": ["m", "m", "m"]}
    assert deltas.diff(before, after) == {"set": {"running": [[1], [6]]}}
    assert deltas.diff(after, after) == {}
    assert deltas.diff(before, {"id": [1], "running": [5], "model": ["m"]})["all"]["id"] == [1]


@needs_node
@settings(costly(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequences=st.lists(st.lists(states(), min_size=1, max_size=4), min_size=12, max_size=24))
def test_the_javascript_twin_follows_the_same_messages(run_js, sequences):
    program = "data.map((messages) => messages.reduce(apply, undefined))"
    assert run_js(program, [follow(sequence) for sequence in sequences]) == [sequence[-1] for sequence in sequences]


NUMBERS = [None, 0, 0.04, 0.05, 0.25, 0.5, 0.949, 0.95, 0.995, 0.9996, 1, 1.5, 2.5, 9.94, 9.95, 9.96, 10, 42, 99.94]
NUMBERS += [99.95, 100, 412, 412.5, 999.4, 999.5, 1329, 9994, 9995, 9999.5, 10_000, 48_230, 999_949, 999_950, 1_234_567]
NUMBERS += [number * 1.0137 for number in NUMBERS if number]


@needs_node
def test_the_javascript_twin_writes_the_same_numbers(run_js):
    names = sorted(set(FORMATS) - {"status"})
    row = {"instances": 64}
    program = (
        "data.numbers.map((value) => [...data.names.map((name) => FORMATS[name](value, data.row)),"
        " duration(value), age(value)])"
    )
    written = run_js(program, {"numbers": NUMBERS, "names": names, "row": row})
    expected = [[*(FORMATS[name](value, row) for name in names), duration(value), age(value)] for value in NUMBERS]
    assert written == expected


@needs_node
def test_the_javascript_twin_knows_the_same_formats_and_words(run_js):
    from controlplane.console.formats import STATUS_WORDS

    assert run_js("Object.keys(FORMATS).sort()", None) == sorted(FORMATS)
    assert run_js("data.map((word) => FORMATS.status(word))", [*STATUS_WORDS, None, "unheard-of"]) == [
        *STATUS_WORDS.values(),
        "–",  # noqa: RUF001
        "unheard-of",
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("quantity", 38.44, "38.4"),
        ("quantity", 48_230, "48.2k"),
        ("quantity", 1_234_567, "1.23M"),
        ("milliseconds", 8.44, "8.4 ms"),
        ("milliseconds", 412.2, "412 ms"),
        ("milliseconds", 1_500, "1.50 s"),
        ("milliseconds", 73_000, "73.0 s"),
        ("percent", 0.615, "62%"),
        ("percent_fine", 0.9996, "99.9%"),
        ("count", 1329, "1,329"),
        ("ready_of", 63, "63 of 64"),
    ],
)
def test_numbers_read_as_people_write_them(name, value, text):
    assert FORMATS[name](value, {"instances": 64}) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (10, "10"), (9_999, "9,999"), (48_230, "48.2k"), (None, "\N{EN DASH}")]
)
def test_what_is_counted_has_no_decimals(value, text):
    assert amount(value) == text
