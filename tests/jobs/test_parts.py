"""Parts of the stack: what this process sees, with what the supervisor says of their processes."""

from controlplane.jobs.parts import Part, PartState, merged, supervised
from controlplane.supervisor.guard import MARK
from controlplane.supervisor.state import write_parts

ROW = {"name": "celery", "state": "running", "process_id": 7, "since": 5.0, "restarts": 2, "detail": "3 processes"}


def test_only_children_of_the_supervisor_believe_its_file(tmp_path, monkeypatch):
    write_parts(tmp_path, "mine", [ROW])
    monkeypatch.setenv(MARK, "mine")
    assert supervised(tmp_path)["celery"] == Part("celery", PartState.OK, "3 processes", 5.0, 2, 7)
    monkeypatch.setenv(MARK, "another")
    assert supervised(tmp_path) == {}
    monkeypatch.delenv(MARK)
    assert supervised(tmp_path) == {}


def test_a_file_that_is_missing_or_broken_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, "mine")
    assert supervised(tmp_path) == {}
    (tmp_path / "parts.json").write_text("{")
    assert supervised(tmp_path) == {}


def test_what_the_supervisor_starts_again_is_down_whatever_was_seen_last():
    kept = Part("celery", PartState.DOWN, "celery ended (SIGKILL)", 5.0, 3)
    traffic = Part("traffic", PartState.OK, "waves", 5.0, 0, 9)
    parts = merged(
        [Part("redis", PartState.OK), Part("celery", PartState.OK, "a worker answers")],
        {"celery": kept, "traffic": traffic},
    )
    assert [part.name for part in parts] == ["redis", "celery", "traffic"]
    assert (parts[1].state, parts[1].detail, parts[1].restarts) == (PartState.DOWN, "celery ended (SIGKILL)", 3)
