"""Parts of the stack: what this process sees, with what the supervisor says of their processes."""

import json

import pytest

from controlplane.jobs.parts import Part, PartState, merged, supervised
from controlplane.supervisor.child import MARK

ROW = {"name": "celery", "state": "running", "process_id": 7, "restarts": 2, "detail": "3 processes"}
CELERY = Part("celery", PartState.OK, "3 processes", None, 2, 7)


@pytest.mark.parametrize(
    ("mark", "written", "parts"),
    [
        ("{}", json.dumps([ROW]), {"celery": CELERY}),
        ("another", json.dumps([ROW]), {}),
        ("", json.dumps([ROW]), {}),
        ("{}", "{", {}),
        ("{}", None, {}),
    ],
    ids=["ours", "another folder's", "no supervisor", "broken", "missing"],
)
def test_only_children_of_the_supervisor_believe_its_file(tmp_path, monkeypatch, mark, written, parts):
    monkeypatch.setenv(MARK, mark.format(tmp_path))
    if written is not None:
        (tmp_path / "parts.json").write_text(written)
    assert supervised(tmp_path) == parts


def test_what_the_supervisor_starts_again_is_down_whatever_was_seen_last():
    kept = Part("celery", PartState.DOWN, "celery ended (SIGKILL)", 5.0, 3)
    traffic = Part("traffic", PartState.OK, "waves", 5.0, 0, 9)
    parts = merged(
        [Part("redis", PartState.OK), Part("celery", PartState.OK, "a worker answers")],
        {"celery": kept, "traffic": traffic},
    )
    assert [part.name for part in parts] == ["redis", "celery", "traffic"]
    assert (parts[1].state, parts[1].detail, parts[1].restarts) == (PartState.DOWN, "celery ended (SIGKILL)", 3)
