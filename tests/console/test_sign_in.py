"""Signing in by password and by link, and the lockout after repeated failures."""

from datetime import timedelta

import pytest
from django.urls import reverse

from controlplane.accounts.services import create_sign_in_link
from controlplane.console.access import lockout
from controlplane.events.models import Event

URL = "/sign-in/"
PASSWORD = "correct horse battery"


@pytest.fixture
def person(viewer):
    viewer.set_password(PASSWORD)
    viewer.save()
    return viewer


def sign_in(client, password=PASSWORD, username="viewer", **headers):
    return client.post(URL, {"username": username, "password": password, "next": "/events/"}, **headers)


def test_by_password_and_out(client, person):
    assert "Sign in" in client.get(URL).content.decode()
    answer = sign_in(client)
    assert answer["Location"] == "/events/"
    assert client.get("/events/").status_code == 200
    assert client.get(URL)["Location"] == "/"  # nothing to do there
    assert client.get("/sign-out/").status_code == 405
    client.post("/sign-out/")
    assert client.get("/events/").status_code == 302


def test_wrong_passwords_are_refused_without_saying_which_half(client, person):
    for username in ("viewer", "nobody"):
        answer = sign_in(client, "wrong", username)
        assert answer.status_code == 401
        assert "Wrong user name or password" in answer.content.decode()


def test_the_door_closes_after_repeated_failures_and_opens_again(client, person, monkeypatch):
    for _ in range(lockout.PAIR_FAILURES):
        assert sign_in(client, "wrong").status_code == 401
    assert sign_in(client).status_code == 429  # also with the right password
    assert (
        sign_in(client, REMOTE_ADDR="10.0.0.9").status_code == 302
    )  # another person's guesses lock no one out elsewhere
    assert Event.objects.filter(kind=lockout.FAILED).count() == lockout.PAIR_FAILURES
    monkeypatch.setattr(lockout, "WINDOW", timedelta(0))
    assert sign_in(client).status_code == 302


def test_signing_in_clears_the_count(client, person):
    for _ in range(2):
        for _ in range(lockout.PAIR_FAILURES - 1):
            sign_in(client, "wrong")
        assert sign_in(client).status_code == 302
        client.post("/sign-out/")


def test_an_address_that_tries_many_names_is_refused(client, person):
    for number in range(lockout.ADDRESS_FAILURES):
        sign_in(client, "wrong", f"name-{number}")
    assert sign_in(client).status_code == 429


def test_typed_names_are_not_kept(client, db):
    sign_in(client, "x", "my-password-in-the-wrong-field")
    event = Event.objects.get(kind=lockout.FAILED)
    assert "my-password" not in str([event.actor, event.subject, event.reason, event.inputs])


@pytest.mark.parametrize("url", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)"])
def test_afterwards_one_stays_here(client, person, url):
    answer = client.post(URL, {"username": "viewer", "password": PASSWORD, "next": url})
    assert answer["Location"] == "/"


def test_a_link_signs_in_once(client, person):
    url = reverse("console:sign-in-link", args=[create_sign_in_link(person)])
    assert "works once" in client.get(url).content.decode()
    assert client.get("/").status_code == 302  # opening it, as a mail scanner does, does not use it up
    assert client.post(url)["Location"] == "/"
    assert client.get("/").status_code == 200
    client.post("/sign-out/")
    answer = client.post(url)
    assert answer.status_code == 410
    assert "This link has ended" in answer.content.decode()
