import codecs
import io
import json

import pytest

from controlplane.batches import validation
from controlplane.batches.validation import ENDPOINTS, Line, Problem, Served, check_lines, lines_of
from scheduling.model_task import Task

CHAT = "/v1/chat/completions"


def line(custom_id="a", **changes):
    value = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}} | changes
    return json.dumps(value).encode() + b"\n"


def check(*lines):
    return list(check_lines(lines, CHAT, {"m": Served(Task.GENERATE, "m"), "e": Served(Task.EMBED, "e")}))


def test_lines_are_found_again_by_their_offset():
    file = codecs.BOM_UTF8 + line("a") + b"\r\n" + line("b").rstrip()
    first, second = check(*lines_of(io.BytesIO(file)))
    assert [first.custom_id, second.custom_id, second.number] == ["a", "b", 3]
    for one in (first, second):
        assert json.loads(file[one.offset : one.offset + one.size_bytes])["custom_id"] == one.custom_id


def test_a_line_that_is_too_large_is_not_held_in_memory(monkeypatch):
    monkeypatch.setattr(validation, "MAX_LINE_BYTES", 200)
    large, last = lines_of(io.BytesIO(b"x" * 1000 + b"\n" + line("b")))
    assert (len(large), last) == (201, line("b"))
    assert check(large)[0].code == "line_too_large"


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{broken\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b"\xff\n", "invalid_json_line", None),
        (line("\xe9").replace(b"\\u00e9", b"\xe9"), "invalid_json_line", None),
        (b"[" * 100_000 + b"\n", "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line("a\0"), "missing_required_parameter", "custom_id"),
        (line(custom_id=""), "missing_required_parameter", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(method="\x7f" * 10_000), "invalid_method", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(url="\x7f" * 10_000), "invalid_url", "url"),
        (line(url=["\x7f"] * 10_000), "invalid_url", "url"),
        (line(body={"model": "\x7f" * 10_000}), "model_not_found", "body.model"),
        (line(body=[]), "missing_required_parameter", "body"),
        (line(body={"model": "other"}), "model_not_found", "body.model"),
        (line(body={"model": ["m"]}), "model_not_found", "body.model"),
        (line(body={"model": "e"}), "unsupported_endpoint", "body.model"),
        (line(body={"model": "m", "stream": True}), "invalid_value", "body.stream"),
    ],
)
def test_a_faulty_line_is_named(raw, code, param):
    good, problem = check(line("good"), raw)
    assert isinstance(good, Line)
    assert isinstance(problem, Problem)
    assert (problem.code, problem.param, problem.line) == (code, param, 2)
    assert len(problem.message) < 200


def test_a_second_use_of_a_custom_id_is_a_fault_that_names_the_first():
    *_, problem = check(line("\x7f" * 512), line("b"), line("\x7f" * 512))
    assert problem.code == "duplicate_custom_id"
    assert "line 1" in problem.message
    assert len(problem.message) < 200


def test_an_empty_file_and_one_with_too_many_requests_fail(monkeypatch):
    for file in ((), (b"\n", b" \r\n")):
        assert check(*file)[0].code == "empty_file"
    monkeypatch.setattr(validation, "MAX_LINES", 2)
    checked = check(line("a"), line("b"), line("c"), line("d"))
    assert [type(one) for one in checked] == [Line, Line, Problem]
    assert checked[-1].code == "too_many_requests"
    assert len(check(*[b"{\n"] * 9)) == 3, "faulty lines count: each is kept until the file is read"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_endpoint_takes_the_models_that_serve_it(endpoint):
    models = {task.value: Served(task, task.value) for task in Task}
    lines = [line(name, url=endpoint, body={"model": name}) for name in models]
    taken = [one.model for one in check_lines(lines, endpoint, models) if isinstance(one, Line)]
    expected = {
        "/v1/embeddings": ["embed"],
        "/v1/rerank": ["embed", "token_embed", "score"],
        "/v1/score": ["embed", "token_embed", "score"],
    }
    assert taken == expected.get(endpoint, ["generate"])
