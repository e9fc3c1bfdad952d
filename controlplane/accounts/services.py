"""Writes to accounts: API keys and sign-in links. Each one is an event row in the same transaction."""

import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import KEY_SHOWN_CHARS, ApiKey, SignInLink, Tenant, User, hash_secret
from controlplane.events.models import Severity
from controlplane.events.services import record

SIGN_IN_LINK_LIFETIME = timedelta(minutes=30)


@transaction.atomic
def create_api_key(
    tenant: Tenant, name: str, actor: User | str, *, expires_at: datetime | None = None
) -> tuple[ApiKey, str]:
    """A new key of *tenant* and its secret. The secret is not stored: this return value is its only appearance.

    Raises ValidationError naming the field for an empty or overlong name, a time in the past, or an inactive tenant.
    """
    secret = ApiKey.new_secret()
    key = ApiKey(
        tenant=tenant,
        name=name.strip(),
        prefix=secret[:KEY_SHOWN_CHARS],
        sha256=hash_secret(secret),
        created_by=actor if isinstance(actor, User) else None,
        expires_at=expires_at,
    )
    key.full_clean()
    key.save()
    record(
        "api_key.created",
        key,
        actor=actor,
        after={
            "tenant": tenant.name,
            "name": key.name,
            "prefix": key.prefix,
            "expires_at": expires_at.isoformat() if expires_at else None,
        },
    )
    return key, secret


@transaction.atomic
def revoke_api_key(key: ApiKey, actor: User | str, reason: str) -> ApiKey:
    """End *key*. The gateway refuses it within `PILOTHOUSE_KEY_CACHE_S`. Revoking a revoked key changes nothing."""
    row = ApiKey.objects.select_for_update().select_related("tenant").get(pk=key.pk)
    if row.revoked_at is None:
        row.revoked_at = timezone.now()
        row.save(update_fields=["revoked_at"])
        record(
            "api_key.revoked",
            row,
            actor=actor,
            before={"usable": True},
            after={"usable": False, "tenant": row.tenant.name, "prefix": row.prefix},
            reason=reason,
            severity=Severity.WARNING,
        )
    key.revoked_at = row.revoked_at
    return row


@transaction.atomic
def create_sign_in_link(
    user: User, *, lifetime: timedelta = SIGN_IN_LINK_LIFETIME, actor: User | str = "pilothouse"
) -> str:
    """A token that signs *user* in once within *lifetime*, at `/sign-in/<token>/`; only its SHA-256 is stored."""
    token = secrets.token_urlsafe(32)
    expires_at = timezone.now() + lifetime
    SignInLink.objects.create(user=user, sha256=hash_secret(token), expires_at=expires_at)
    record("sign_in_link.created", user, actor=actor, after={"expires_at": expires_at.isoformat()})
    return token


@transaction.atomic
def use_sign_in_link(token: str) -> User | None:
    """The user whom *token* signs in, or None if it is unknown, used, out of date or the user is inactive.

    The row is claimed by one update, so that of two simultaneous uses one alone succeeds.
    """
    now = timezone.now()
    live = SignInLink.objects.filter(
        sha256=hash_secret(token), used_at__isnull=True, expires_at__gt=now, user__is_active=True
    )
    link = live.select_related("user").first()
    if link is None or not live.filter(pk=link.pk).update(used_at=now):
        return None
    record("sign_in_link.used", link.user, actor=link.user)
    return link.user
