"""Sign-in throttling based on failed-sign-in events: no table, and nothing to clean up.

A (name, address) pair is refused after PAIR_FAILURES within WINDOW, until the window has passed or a sign-in with that name
and address succeeded; an address after ADDRESS_FAILURES, whatever the names. Refused attempts are not recorded, so the log
cannot be flooded. Names are stored only as a digest, since people type passwords into the wrong field.
"""

import hashlib
from datetime import timedelta

from django.conf import settings
from django.http import HttpRequest
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity
from controlplane.events.services import record

WINDOW = timedelta(minutes=15)
PAIR_FAILURES = 5
ADDRESS_FAILURES = 25
FAILED, DONE = "sign_in.failed", "sign_in.done"


def address_of(request: HttpRequest) -> str:
    """Return the client's address (uvicorn resolves a trusted proxy's header)."""
    return str(request.META.get("REMOTE_ADDR", ""))


def digest(username: str) -> str:
    text = f"{settings.SECRET_KEY}:{username.strip().lower()}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def is_locked(username: str, address: str) -> bool:
    name = digest(username)
    recent = Event.objects.filter(
        kind__in=(FAILED, DONE), at__gte=timezone.now() - WINDOW, inputs__address=address
    ).order_by("-pk")
    of_pair = of_address = 0
    signed_in_since = False
    for kind, inputs in recent.values_list("kind", "inputs")[: 4 * ADDRESS_FAILURES]:
        if kind == DONE:
            signed_in_since = signed_in_since or inputs.get("name") == name
            continue
        of_address += 1
        of_pair += inputs.get("name") == name and not signed_in_since
    return of_pair >= PAIR_FAILURES or of_address >= ADDRESS_FAILURES


def note_failure(username: str, address: str) -> None:
    user = User.objects.filter(username=username).first()
    record(
        FAILED,
        user,
        actor="sign-in",
        reason="wrong name or password",
        inputs={"name": digest(username), "address": address},
        severity=Severity.WARNING,
    )


def note_success(user: User, address: str) -> None:
    record(DONE, user, actor=user, inputs={"name": digest(user.get_username()), "address": address})
