"""The broker's messages and workers, without a broker and without a worker."""

import socket
import time
from types import SimpleNamespace

import pytest
from kombu.exceptions import OperationalError
from kombu.transport.redis import Channel

from controlplane.jobs import broker
from controlplane.jobs.broker import answering_workers
from workers import celery


def test_without_a_broker_it_raises_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises((OperationalError, OSError)):
            answering_workers(f"redis://127.0.0.1:{closed.getsockname()[1]}/0", 0.5)
        assert time.monotonic() - began < 5


def test_a_channel_of_a_lost_connection_fails_as_one(monkeypatch):
    """C39: it failed with AttributeError, which ended the worker."""
    monkeypatch.setattr(Channel, "_connparams", Channel._connparams)
    celery.survive_the_loss_of_the_broker()
    channel = object.__new__(Channel)
    channel.connection = SimpleNamespace(client=None)
    with pytest.raises(ConnectionError, match="given up"):
        channel._connparams()


def test_an_unread_queue_does_not_grow(monkeypatch):
    monkeypatch.setattr(broker, "_unread", lambda queue: broker.MOST_UNREAD)
    monkeypatch.setattr(broker.celery_app, "send_task", lambda *a, **k: pytest.fail("one more was sent"))
    assert broker.send_task("a.task", queue="node.gone")
