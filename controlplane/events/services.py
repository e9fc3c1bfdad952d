"""Writes events."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity

guard: ContextVar[Callable[[], object]] = ContextVar("guard", default=lambda: None)
"""Called in the transaction of each event of a context. Raises where its process may decide nothing any longer."""


def record(
    kind: str,
    subject: Any = None,
    *,
    actor: User | str,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str = "",
    inputs: dict[str, Any] | None = None,
    severity: Severity = Severity.INFO,
) -> Event:
    """Record one event about *subject* (a row or None); *actor* is a user or the name of a component.

    Raises what the `guard` of the context raises; then the transaction is not to be committed.
    """
    guard.get()()
    user = actor if isinstance(actor, User) else None
    return Event.objects.create(
        kind=kind,
        severity=severity,
        user=user,
        actor=actor if isinstance(actor, str) else actor.get_username(),
        subject_type=subject._meta.model_name if subject is not None else "",
        subject_id=str(subject.pk) if subject is not None else "",
        subject=str(subject)[:160] if subject is not None else "",
        before=before or {},
        after=after or {},
        reason=reason,
        inputs=inputs or {},
    )
