"""Messages to receivers of every temper: once, again after failures, never too long, and none too many."""

import json
import logging
import socket
import time
from datetime import timedelta
from email import message_from_bytes
from email.policy import default
from types import SimpleNamespace

import pytest
from aiosmtpd.controller import Controller
from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.alerts import messages
from controlplane.alerts.models import Alert, AlertRule
from controlplane.alerts.problems import Known, Problem, find
from controlplane.alerts.watch import AlertWatch
from controlplane.events.models import Event
from controlplane.webhooks import call, pause_s
from tests.receiver import receiver

NOTHING: tuple[Problem, ...] = ()


def down(*names: str) -> tuple[Problem, ...]:
    return find({"parts": [{"name": name, "state": "down", "detail": "<ended>"} for name in names]}, Known())


@database_sync_to_async
def make_rule(name: str, url: str, **values) -> AlertRule:
    return AlertRule.objects.create(name=name, condition="job", receivers=url, **values)


@database_sync_to_async
def rule_now(name: str) -> AlertRule:
    return AlertRule.objects.get(name=name)


def watch_of(signals: list[tuple[Problem, ...]]) -> AlertWatch:
    """A watch that reads the last of *signals*."""
    return AlertWatch(SimpleNamespace(), lambda: signals[-1])


@pytest.mark.django_db(transaction=True)
async def test_it_is_notified_of_the_beginning_and_the_end_once_each(settings):
    settings.PUBLIC_URL = "https://pilothouse.example"
    async with receiver() as (there, url):
        await make_rule("parts", f"{url}/takes")
        now, signals = timezone.now(), [down("redis", "beat")]
        watch = watch_of(signals)
        for after_s in (0, 10, 20):
            await watch.look(now + timedelta(seconds=after_s))
        signals.append(NOTHING)
        for after_s in (90, 100):
            await watch.look(now + timedelta(seconds=after_s))
    first, last = there.taken
    assert (first["version"], first["status"], last["status"]) == ("4", "firing", "resolved")
    assert [each["labels"]["subject"] for each in first["alerts"]] == ["part beat", "part redis"]
    assert first["alerts"][0]["annotations"] == {
        "summary": "parts: part beat",
        "description": "Celery beat: down: <ended>",
    }
    assert first["alerts"][0]["generatorURL"] == "https://pilothouse.example/system/"
    assert last["alerts"][0]["fingerprint"] == first["alerts"][0]["fingerprint"]
    assert last["alerts"][0]["endsAt"] > first["alerts"][0]["startsAt"]


@pytest.mark.django_db(transaction=True)
async def test_it_is_repeated_until_it_is_acknowledged():
    async with receiver() as (there, url):
        await make_rule("parts", f"{url}/takes", repeat_hours=1)
        now, watch = timezone.now(), watch_of([down("redis")])
        for hours in (0, 0.5, 1.01, 1.5):
            await watch.look(now + timedelta(hours=hours))
        assert there.calls == 2
        await database_sync_to_async(Alert.objects.update)(acknowledged_at=now)
        await watch.look(now + timedelta(hours=9))
        assert there.calls == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fails", "answered 500"),
        ("redirects", "answered 302: redirects are not followed, give the final address"),
        ("hangs", "did not answer within 0.2 s"),
    ],
)
async def test_a_receiver_that_fails_is_tried_again_ever_later_and_given_up(path, error, monkeypatch, caplog):
    monkeypatch.setattr("controlplane.webhooks.CALL_S", 0.2)
    async with receiver() as (there, url):
        await make_rule("bad", f"{url}/{path}")
        now, watch = timezone.now(), watch_of([down("redis")])
        await watch.look(now)
        await watch.look(now)  # its pause is not over
        assert there.calls == 1
        rule = await rule_now("bad")
        assert (rule.failures, rule.delivery_error) == (1, f"http://127.0.0.1/… {error}")
        assert 9 < (rule.try_at - now).total_seconds() <= 10
        for later in range(messages.MOST_TRIES + 3):
            await watch.look(now + timedelta(minutes=40 * (1 + later)))
        assert there.calls == messages.MOST_TRIES
        assert there.taken == []
        given_up = await database_sync_to_async(Event.objects.get)(kind="alert_rule.not_delivered")
        assert error in given_up.reason
        assert given_up.reason.startswith("http://127.0.0.1/…")
        await watch.look(now + timedelta(hours=12))  # the repetition is another message
        assert there.calls == messages.MOST_TRIES + 1
    assert [record.levelno for record in caplog.records if record.message.startswith("alerts: of bad")] == [
        logging.WARNING
    ] * 3
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.django_db(transaction=True)
async def test_slow_receivers_hold_up_no_other_and_an_endless_answer_is_not_read(monkeypatch):
    monkeypatch.setattr("controlplane.webhooks.CALL_S", 1.0)
    async with receiver() as (there, url):
        for number in range(6):
            await make_rule(f"hangs {number}", f"{url}/hangs")
        await make_rule("drips", f"{url}/drips")
        await make_rule("takes", f"{url}/takes")
        began = time.monotonic()
        await watch_of([down("redis")]).look(timezone.now())
        assert time.monotonic() - began < 5
        assert there.calls == 8
        assert len(there.taken) == 1
        assert (await rule_now("drips")).failures == 0


class Mailbox:
    """What an SMTP server takes; it refuses mail to `nobody@`."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], str]] = []

    async def handle_RCPT(self, server, session, envelope, address, options):
        if address.startswith("nobody@"):
            return "550 no such person"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):
        self.taken.append((envelope.rcpt_tos, str(message_from_bytes(envelope.content, policy=default))))
        return "250 OK"


@pytest.mark.django_db(transaction=True)
async def test_people_are_told_by_mail_beside_a_webhook_and_what_fails_is_said(settings):
    """By a real SMTP server; the end of an alert is a message, too."""
    box = Mailbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Controller(box, hostname="127.0.0.1", port=port)
    server.start()
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", port
    settings.PUBLIC_URL = "https://pilothouse.example"
    try:
        async with receiver() as (there, url):
            await make_rule("parts", f"{url}/takes mailto:ops@example.com sre@example.com")
            now, signals = timezone.now(), [down("redis")]
            watch = watch_of(signals)
            await watch.look(now)
            signals.append(NOTHING)
            await watch.look(now + timedelta(seconds=90))
            assert there.calls == 2
            assert sorted(to for tos, _ in box.taken for to in tos) == ["ops@example.com"] * 2 + ["sre@example.com"] * 2
            began, ended = (
                next(text for _, text in box.taken if word in text) for word in ("Critical: parts", "Resolved")
            )
            assert "Redis: down: <ended>" in began
            assert "https://pilothouse.example/system/" in began
            assert "Subject: [Pilothouse] Resolved: parts: part redis" in ended
            rule = await make_rule("wrong", f"{url}/takes nobody@example.com")
            said = await messages.notify(rule, messages.sample(rule, now))
            assert said == "nobody@example.com could not be sent: SMTPRecipientsRefused"
    finally:
        server.stop()
    settings.EMAIL_PORT = 9
    said = await messages.notify(rule, messages.sample(rule, now))
    assert "nobody@example.com could not be sent: ConnectionRefusedError" in said


async def test_an_address_that_does_not_answer_is_an_error_without_the_address():
    said = await call("http://127.0.0.1:9/T0KEN", {})
    assert said.startswith("could not be reached: Client")
    assert "T0KEN" not in said


def test_a_storm_is_one_message_of_bounded_length_in_both_formats():
    now = timezone.now()
    rule = AlertRule(pk=1, name="a & b", condition="job", severity="critical")
    alerts = [
        Alert(rule=rule, subject=f"<{number}>", detail="d", severity="critical", since=now) for number in range(200)
    ]
    body = messages.body_of(rule, alerts)
    assert (len(body["alerts"]), body["truncatedAlerts"]) == (50, 150)
    rule.webhook_format = "slack"
    text = messages.body_of(rule, alerts)["text"]
    assert text.startswith(":red_circle: a &amp; b: *&lt;0&gt;*\nd\n")
    assert text.endswith("\nand 150 more")
    assert len(json.dumps(text)) < 4_000


@pytest.mark.parametrize(
    ("values", "due"),
    [
        ({}, "firing"),
        ({"notified": "firing", "notified_at": 1}, ""),
        ({"notified": "firing", "notified_at": 5}, "firing"),
        ({"notified": "firing", "notified_at": 5, "acknowledged_at": 1}, ""),
        ({"silenced_until": -1}, ""),
        ({"silenced_until": 1}, "firing"),
        ({"resolved_at": 0}, ""),
        ({"resolved_at": 0, "notified": "firing", "notified_at": 1}, ""),
        ({"resolved_at": 0, "settled": True, "notified": "firing", "notified_at": 1}, "resolved"),
        ({"resolved_at": 0, "settled": True, "notified": "firing", "notified_at": 1, "silenced_until": -1}, "resolved"),
        ({"resolved_at": 0, "notified": "resolved", "notified_at": 1}, ""),
    ],
)
def test_which_message_is_due(values, due):
    """Numbers are hours ago."""
    now = timezone.now()
    given = {name: now - timedelta(hours=value) if type(value) is int else value for name, value in values.items()}
    assert messages.message_due(Alert(rule=AlertRule(repeat_hours=4), **given), now) == due


def test_pauses_grow_to_a_bound():
    assert [pause_s(failures) for failures in (1, 2, 3, 8, 20)] == [10, 20, 40, 1280, 1800]
