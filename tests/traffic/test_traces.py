"""The trace readers: what they read, and how they say where a file is wrong."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from scheduling.simulation.workload.traces import FORMATS, TraceError, TraceRequest, load_trace, read_trace, unit_of

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55"""  # as published: seven decimals, no newline at the end

MOONCAKE = """{"timestamp": 27482, "input_length": 1355, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 1472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""

BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,472,18,490,Conversation log
45.5,,2.0,GPT-4,1087,0,1087,API log
"""

SERVEGEN = """t_s,requests,req_per_s,active_clients,prompt_tokens,output_tokens
1200,600,1.0,21,120000,60000
1800,0,0.0,0,0,0
2400,1200,2.0,22,120000,600
"""


@pytest.fixture
def trace(tmp_path: Path):
    def write(text: str, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_azure(trace) -> None:
    first, second, third = read_trace(trace(AZURE), "azure")
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert third.arrival_s == pytest.approx(4.541977, abs=1e-6)


def test_azure_of_2024_has_an_offset(trace) -> None:
    text = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01+02:00,2399,6
"""
    requests = list(read_trace(trace(text), "azure"))
    assert requests[1].arrival_s == pytest.approx(0.99007, abs=1e-6)


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_milliseconds_of_azure_stay_milliseconds(tmp_path: Path, zone: str) -> None:
    """C80: seven decimals, several in one second, no output, other line ends and a byte order mark."""
    rows = [(10_000, 3), (20_000, 3), (90_000, 0), (110_000, 4)]  # of 100 ns
    lines = [f"2024-05-10 00:00:00.{ticks:07d}{zone},7,{output}" for ticks, output in rows]
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]).encode())
    assert [request.arrival_s for request in read_trace(path, "azure")] == pytest.approx(
        [0.0, 0.001, 0.008, 0.010], abs=1e-6
    )
    loaded = load_trace(path, "azure")
    assert loaded.arrival_s.tolist() == pytest.approx([0.0, 0.001, 0.010], abs=1e-6)
    assert loaded.left_out == 1


def test_mooncake(trace) -> None:
    assert list(read_trace(trace(MOONCAKE), "mooncake", unit="ms")) == [
        TraceRequest(0.0, 1355, 52, prefix_blocks=(46, 47, 2353)),
        TraceRequest(3.053, 1472, 26, prefix_blocks=(46, 47, 2366)),
    ]


def test_burstgpt_of_both_releases(trace) -> None:
    expected = [TraceRequest(0.0, 472, 18, "ChatGPT"), TraceRequest(40.5, 1087, 0, "GPT-4")]
    assert list(read_trace(trace(BURSTGPT), "burstgpt")) == expected
    first_release = "\n".join(
        ",".join(value for index, value in enumerate(line.split(",")) if index not in {1, 2})
        for line in BURSTGPT.splitlines()
    )
    assert list(read_trace(trace(first_release), "burstgpt")) == expected


def test_servegen_is_a_seeded_draw_from_the_rates(trace) -> None:
    path = trace(SERVEGEN)
    requests = list(read_trace(path, "servegen", seed=7))
    assert requests == list(read_trace(path, "servegen", seed=7))
    assert requests != list(read_trace(path, "servegen", seed=8))
    first = [request for request in requests if request.arrival_s < 600]
    last = [request for request in requests if request.arrival_s >= 1200]
    assert len(first) + len(last) == len(requests)  # nothing in the empty bin
    assert len(first) == pytest.approx(600, abs=5 * 600**0.5)
    assert len(last) == pytest.approx(1200, abs=5 * 1200**0.5)
    assert {(request.prompt_tokens, request.output_tokens) for request in first} == {(200, 100)}
    assert {(request.prompt_tokens, request.output_tokens) for request in last} == {(100, 1)}  # 0.5 tokens is one
    assert requests[-1].arrival_s < 1800


def test_compressed_files_and_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + AZURE.encode()))
    assert [request.prompt_tokens for request in read_trace(path, "azure")] == [374, 396, 879]


def test_a_long_trace_is_streamed(trace) -> None:
    """The first rows come before a mistake further down is met."""
    rows = read_trace(trace(AZURE + "\nnonsense,1,1\n"), "azure")
    assert len(list(itertools.islice(rows, 3))) == 3
    with pytest.raises(TraceError):
        next(rows)


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_file_holds_nothing_or_lacks_its_columns(trace, name: str) -> None:
    if name == "mooncake":
        assert list(read_trace(trace(""), name)) == []
    else:
        with pytest.raises(TraceError, match=r"line 1.*is missing; the first line holds nothing"):
            list(read_trace(trace(""), name))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("azure", AZURE.replace("374", "many"), "line 2, column ContextTokens: 'many' is not a number"),
        ("azure", AZURE.replace("374", "-1"), "line 2, column ContextTokens: '-1' is not a number from 0 up"),
        ("azure", AZURE.replace("374", "nan"), "line 2, column ContextTokens: 'nan' is not a number from 0 up"),
        ("azure", AZURE.replace("109", "1.5"), "line 3, column GeneratedTokens: '1.5' is not a whole number"),
        (
            "azure",
            AZURE.replace("2023-11-16 18:15:50.9951690", "noon"),
            "line 3, column TIMESTAMP: 'noon' is not a date",
        ),
        ("azure", AZURE.replace(",109", ""), "line 3: 2 values under a header of 3 columns"),
        (
            "azure",
            AZURE.replace("ContextTokens", "Tokens"),
            "line 1, column ContextTokens: is missing; the first line holds",
        ),
        ("azure", AZURE.replace("18:15:51", "18:15:49"), "request 3 came 1.7726 s before the one above it: sort"),
        ("mooncake", MOONCAKE.replace('"timestamp": 30535, ', ""), "line 2, column timestamp: is missing"),
        ("mooncake", MOONCAKE.replace("1472", '"x"'), "line 2, column input_length: 'x' is not a number"),
        ("mooncake", MOONCAKE.replace("2366]", '"x"]'), "line 2, column hash_ids: is not a list of whole numbers"),
        ("mooncake", MOONCAKE.replace("{", "", 1), "line 1: is not JSON"),
        ("mooncake", "[]\n", "line 1: is not a JSON object"),
        ("burstgpt", BURSTGPT.replace("45.5", "x"), "line 3, column Timestamp: 'x' is not a number"),
        ("servegen", SERVEGEN.replace("60000\n", "\n"), "line 2, column output_tokens: '' is not a number"),
    ],
)
def test_a_wrong_row_is_named(trace, name: str, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(read_trace(trace(text), name, unit="ms" if name == "mooncake" else ""))
    assert message in str(caught.value)
    assert str(caught.value.path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing: No such file"):
        list(read_trace(tmp_path / "missing", "azure"))
    with pytest.raises(TraceError, match="Is a directory"):
        list(read_trace(tmp_path, "azure"))
    torn = tmp_path / "trace.csv.gz"
    torn.write_bytes(gzip.compress(AZURE.encode())[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(torn, "azure"))
    (tmp_path / "not.gz").write_text(AZURE)
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(tmp_path / "not.gz", "azure"))
    (tmp_path / "latin").write_bytes(AZURE.encode() + b"\n\xff")
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(tmp_path / "latin", "azure"))


CLOCK = """Timestamp,Model,Request tokens,Response tokens
0:00:00,ChatGPT,472,18
0:10:05.5,ChatGPT,1,18
26:10:05,GPT-4,1087,2
"""
SESSIONS = """{"session_id": "a", "timestamp": 1000, "input_length": 9, "output_length": 2}
{"session_id": "b", "timestamp": "0:00:03", "input_length": 8, "output_length": 2}
{"session_id": "a", "delay": 500, "input_length": 20, "output_length": 2}
{"timestamp": 4000, "input_length": 7, "output_length": 2, "hash_ids": [18446744073709551615]}
{"session_id": "a", "timestamp": null, "delay": 0, "input_length": 30, "output_length": 2, "hash_ids": [-1]}
"""


def test_clock_times_are_elapsed_times(trace) -> None:
    """C26."""
    assert [request.arrival_s for request in read_trace(trace(CLOCK), "burstgpt")] == [0.0, 605.5, 94_205.0]
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n0:00:06,2,2\n"
    assert [request.arrival_s for request in read_trace(trace(azure), "azure")] == [0.0, 1.0]


def test_turns_of_a_session_may_have_a_delay(trace) -> None:
    """C25: a simulation, which knows no answers, says what to do."""
    requests = list(read_trace(trace(SESSIONS), "mooncake", unit="ms"))
    assert [(each.session, each.arrival_s, each.delay_s, each.line) for each in requests] == [
        ("a", 0.0, None, 1),
        ("b", 2.0, None, 2),
        ("a", 0.0, 0.5, 3),
        ("", 3.0, None, 4),
        ("a", 0.0, 0.0, 5),
    ]
    with pytest.raises(TraceError, match=r"line 3, column delay: the turn waits for an answer.*replay the trace"):
        load_trace(trace(SESSIONS), "mooncake", unit="ms")


def test_hashes_of_64_bits_stay_distinct(trace) -> None:
    """C14."""
    ids = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    path = trace(json.dumps({"timestamp": 0, "input_length": 7 * 512, "output_length": 1, "hash_ids": ids}))
    loaded = load_trace(path, "mooncake")
    assert loaded.prefix_hashes is not None
    assert len(set(loaded.prefix_hashes.tolist())) == len(ids)


def of_mooncake(**fields: object) -> str:
    return MOONCAKE + json.dumps({"timestamp": 40_000, "input_length": 1, "output_length": 1} | fields)


IN_SECONDS = "".join(
    json.dumps({"timestamp": number / 3, "input_length": 1, "output_length": 1}) + "\n" for number in range(10_000)
)
MANY_NAMES = "Timestamp,Model,Request tokens,Response tokens\n" + "".join(f"{n},m{n},1,1\n" for n in range(40_000))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mooncake", of_mooncake(hash_ids=[2**64]), "line 3, column hash_ids: holds a number of more than 64 bits"),
        ("mooncake", of_mooncake(hash_ids=[True]), "line 3, column hash_ids: is not a list of whole numbers"),
        (
            "mooncake",
            of_mooncake(input_length=3_000_000_000),
            "line 3, column input_length: '3000000000' tokens are more",
        ),
        ("mooncake", of_mooncake(output_length=10**400), "line 3, column output_length: "),
        (
            "mooncake",
            of_mooncake(timestamp="noon"),
            "line 3, column timestamp: 'noon' is not a number of seconds, a clock",
        ),
        ("mooncake", of_mooncake(timestamp=None, delay=3), "line 3, column delay: needs a session_id"),
        ("mooncake", of_mooncake(timestamp=None, delay=3, session_id="n"), "line 3, column delay: the first turn of a"),
        ("mooncake", of_mooncake(timestamp=1.7e18), "line 3, column timestamp: is 53,906,"),
        (
            "mooncake",
            IN_SECONDS,
            "line 1000, column timestamp: the first 1,000 requests came within 0.333 s: numbers",
        ),
        ("mooncake", "[" * 100_000, "line 1: is not JSON"),
        (
            "burstgpt",
            CLOCK.replace("26:10:05", "26:70:05"),
            "line 4, column Timestamp: '26:70:05' is not a number of seconds",
        ),
        ("burstgpt", CLOCK.replace("26:10:05", "0:00:05"), "line 4, column Timestamp: request 3 came 600.5 s before"),
        (
            "burstgpt",
            CLOCK.replace("1087", "3000000000"),
            "line 4, column Request tokens: '3000000000' tokens are more",
        ),
        ("burstgpt", MANY_NAMES, "line 32770, column model: is the name of one model too many"),
        (
            "servegen",
            SERVEGEN.replace("120000,600", "1e15,600"),
            "line 2, column prompt_tokens: are 1,666,666,666,667 tokens",
        ),
        (
            "servegen",
            SERVEGEN.replace("1200,2.0", "1e12,2.0"),
            "line 4, column requests: '1e12' requests in ten minutes",
        ),
    ],
)
def test_what_cannot_be_is_said_with_its_place(trace, name: str, text: str, message: str) -> None:
    """C14: too many tokens, too many names; C26: times that are none."""
    with pytest.raises(TraceError) as caught:
        load_trace(trace(text), name, unit="ms" if name == "mooncake" else "")
    assert message in str(caught.value)


def rows_of(times, **fields) -> str:
    row = {"input_length": 1, "output_length": 1} | fields
    return "".join(json.dumps({"timestamp": at} | row) + "\n" for at in times)


PUBLISHED = rows_of(range(0, 3_600_000, 300))  # 12,000 requests in an hour
DELAYS = rows_of([0], session_id="a") + json.dumps(
    {"session_id": "a", "delay": 2, "input_length": 1, "output_length": 1}
)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (rows_of([0]), "ms"),  # one moment is the same in every unit
        (rows_of([7, 7, 7]), "ms"),
        (rows_of(["0:00:00", "0:00:02"]), "ms"),  # a clock says it
        (PUBLISHED, "ms"),
        (rows_of([0, 1]), ""),
        (rows_of([0, 1.5, 2.25]), ""),
        (rows_of([0, 60, 7200]), ""),
        (rows_of([0, 1_000, 2_000]), ""),
        (rows_of(range(10_000)), ""),
        (rows_of(range(0, 30 * 86_400, 40)), ""),  # a month of seconds
        (DELAYS, ""),
    ],
)
def test_times_that_may_be_seconds_or_milliseconds_need_a_unit(trace, text: str, unit: str) -> None:
    path = trace(text)
    if unit:
        assert unit_of(path, "mooncake") == unit
        assert list(read_trace(path, "mooncake")) == list(read_trace(path, "mooncake", unit=unit))
        return
    with pytest.raises(TraceError, match=r"may be in ms, which makes .*, or in s, which makes .*: say which"):
        next(read_trace(path, "mooncake"))
    ms, s = (list(read_trace(path, "mooncake", unit=each)) for each in ("ms", "s"))
    assert [each.arrival_s for each in s] == pytest.approx([1000 * each.arrival_s for each in ms])
    assert [each.delay_s or 0 for each in s] == pytest.approx([1000 * (each.delay_s or 0) for each in ms])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"mooncake"}))
def test_other_formats_have_seconds(trace, name: str) -> None:
    texts = {"azure": AZURE, "burstgpt": BURSTGPT, "servegen": SERVEGEN, "ledger": ""}
    with pytest.raises(TraceError, match="has seconds where it has numbers"):
        list(read_trace(trace(texts[name]), name, unit="ms"))


@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096])
def test_blocks_of_another_size_are_refused(trace, tokens: int) -> None:
    text = rows_of([0], input_length=8192, hash_ids=list(range(8192 // tokens)))
    with pytest.raises(TraceError, match=f"hash_ids: are {8192 // tokens} blocks of 8,192 tokens; a block has 512"):
        list(read_trace(trace(text), "mooncake"))
