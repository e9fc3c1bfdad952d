"""Celery's clients while the broker is away or a process was killed: one line each, no traceback."""

import logging
import sys

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.worker.consumer.consumer import CANCEL_TASKS_BY_DEFAULT

from workers.beat import Scheduler
from workers.celery import app as application


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    for module in ("kombu.utils.functional", "redis.retry"):
        monkeypatch.setattr(f"{module}.sleep", lambda _: None)  # between tries to connect
    app = Celery("test", broker="redis://127.0.0.1:1/0")
    app.conf.task_publish_retry = False
    app.conf.broker_connection_timeout = 0.1
    app.conf.beat_schedule = {"often": {"task": "t", "schedule": 1.0}}
    made = Scheduler(app, schedule_filename=str(tmp_path / "schedule"))
    yield made
    made.close()


def test_a_missing_broker_is_logged_once_and_unsent_messages_are_counted(scheduler, caplog, monkeypatch):
    entry = scheduler.schedule["often"]
    for _ in range(3):
        scheduler.apply_entry(entry)
    (record,) = caplog.records
    assert "cannot be sent" in record.message
    assert record.exc_info is None
    monkeypatch.setattr(scheduler, "send_task", lambda *_, **__: None)
    scheduler.apply_entry(entry)
    scheduler.apply_entry(entry)
    assert [record.message for record in caplog.records[1:]] == [
        "beat: the broker answers again; 3 periodic tasks were not sent"
    ]


def test_a_schedule_file_cut_off_by_a_crash_is_rebuilt(tmp_path, caplog):
    for suffix in ("", ".dir", ".dat", ".bak", ".db"):
        (tmp_path / f"schedule{suffix}").write_bytes(b"'entries', (0, 9")
    app = Celery("test", broker="redis://127.0.0.1:1/0")
    app.conf.beat_schedule = {"often": {"task": "t", "schedule": 1.0}}
    scheduler = Scheduler(app, schedule_filename=str(tmp_path / "schedule"))
    assert "often" in scheduler.schedule
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].exc_info is None
    scheduler.close()


def test_the_application_uses_it():
    assert application.conf.beat_scheduler == "workers.beat:Scheduler"
    assert application.conf.broker_connection_max_retries is None


def test_a_killed_process_of_the_pool_has_no_traceback(caplog):
    log = logging.getLogger("celery.worker.request")
    for error in (WorkerLostError("signal 9"), ValueError("a mistake of ours")):
        try:
            raise error
        except Exception:
            log.error("Task handler raised error: %r", error, exc_info=sys.exc_info())
    lost, mistake = caplog.records
    assert lost.exc_info is None
    assert mistake.exc_info


def test_celery_does_not_announce_its_next_version_at_every_loss_of_the_broker(caplog):
    assert not application.conf.worker_cancel_long_running_tasks_on_connection_loss
    log = logging.getLogger("py.warnings")
    for warning in (CANCEL_TASKS_BY_DEFAULT, "something else"):
        log.warning("%s", f"consumer.py:427: CPendingDeprecationWarning: {warning}")
    assert [record.getMessage() for record in caplog.records] == [
        "consumer.py:427: CPendingDeprecationWarning: something else"
    ]
