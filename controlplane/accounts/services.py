"""Writes to accounts: API keys and sign-in links. Each one is an event row in the same transaction."""

import secrets
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.text import slugify

from controlplane.accounts.models import (
    KEY_SHOWN_CHARS,
    ApiKey,
    Membership,
    Role,
    SignInLink,
    Tenant,
    User,
    hash_secret,
)
from controlplane.events.models import Severity
from controlplane.events.services import record

SIGN_IN_LINK_LIFETIME = timedelta(minutes=30)
SERVICE_KEY_DAYS = 366
MOST_DAYS = 3_660


@transaction.atomic
def create_api_key(
    tenant: Tenant,
    name: str,
    actor: User | str,
    *,
    expires_at: datetime | None = None,
    role: Role | None = None,
    allowed_models: Collection[str] = (),
) -> tuple[ApiKey, str]:
    """Create a key of *tenant*; return it with its secret, which is not stored.

    With a *role* it is a service key: it acts on `/api` with that role over the fleet, as a separate account, so that
    every event names it. Raises ValidationError naming the field for an empty or overlong name, a time in the past, an
    inactive tenant, or a service key without an end, of a tenant that operates no fleet, or above its maker.
    """
    if role is not None:
        check_service_key(tenant, actor, expires_at, role)
    secret = ApiKey.new_secret()
    key = ApiKey(
        tenant=tenant,
        name=name.strip(),
        prefix=secret[:KEY_SHOWN_CHARS],
        sha256=hash_secret(secret),
        created_by=actor if isinstance(actor, User) else None,
        expires_at=expires_at,
        allowed_models=sorted(set(allowed_models)),
    )
    key.full_clean()
    if role is not None:
        account = User(username=f"{slugify(key.name) or 'service'}@{key.prefix}", service_role=role)
        account.set_unusable_password()
        account.save()
        key.account = account
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
            **({"allowed_models": key.allowed_models} if key.allowed_models else {}),
            **({"role": str(role)} if role is not None else {}),
        },
    )
    return key, secret


def expiry_after(days: str) -> datetime | None:
    """Return when a key of so many *days* expires; None for "". Raise ValidationError for what is no number of days."""
    if not days:
        return None
    if not (days.isdecimal() and len(days) < 5 and 0 < int(days) <= MOST_DAYS):
        raise ValidationError({"expires_at": f"A key expires after 1 to {MOST_DAYS:,} days, or never."})
    return timezone.now() + timedelta(days=int(days))


def check_service_key(tenant: Tenant, actor: User | str, expires_at: datetime | None, role: Role) -> None:
    """Raise ValidationError, naming the field, for a service key that may not be."""
    if not tenant.operates_fleet:
        raise ValidationError({"role": f"{tenant} does not operate the fleet: its keys have no role over it."})
    if isinstance(actor, User) and not actor.has_fleet_role(role):
        raise ValidationError({"role": f"A key may do no more than who makes it: {role} is above your role."})
    if expires_at is None or expires_at > timezone.now() + timedelta(days=SERVICE_KEY_DAYS):
        raise ValidationError({"expires_at": f"A service key expires, within {SERVICE_KEY_DAYS} days."})


@transaction.atomic
def allow_models(key: ApiKey, names: Collection[str], actor: User | str, reason: str = "") -> ApiKey:
    """Let *key* ask for the models *names*, all if there is none; gateways follow within a second."""
    row = ApiKey.objects.select_for_update().get(pk=key.pk)
    before, row.allowed_models = row.allowed_models, sorted(set(names))
    if row.allowed_models != before:
        row.save(update_fields=["allowed_models"])
        after = {"allowed_models": row.allowed_models}
        record("api_key.changed", row, actor=actor, reason=reason, before={"allowed_models": before}, after=after)
    return row


@transaction.atomic
def revoke_api_key(key: ApiKey, actor: User | str, reason: str) -> ApiKey:
    """Revoke *key*; the gateway refuses it within a second. Idempotent."""
    row = ApiKey.objects.select_for_update().select_related("tenant").get(pk=key.pk)
    if row.revoked_at is None:
        row.revoked_at = timezone.now()
        row.save(update_fields=["revoked_at"])
        User.objects.filter(service_key=row).update(is_active=False)
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


def guard_user(user: User, actor: User | str, ends: bool) -> None:
    """Raise ValidationError where *actor* may not change the account *user*, or end it."""
    if user.service_role:
        raise ValidationError("This is the account of a service key: revoke the key.")
    if user.is_superuser and not (isinstance(actor, User) and actor.is_superuser):
        raise ValidationError("Only a superuser changes a superuser.")
    if user == actor and (ends or not user.is_active):
        raise ValidationError("Nobody ends their own account: ask another admin.")


def guard_member(membership: Membership, actor: User | str, ends: bool) -> None:
    """Raise ValidationError where *actor* may not change what *membership* allows."""
    guard_user(membership.user, actor, False)
    if membership.user == actor and not membership.user.is_superuser:
        raise ValidationError("Nobody changes their own roles: ask another admin.")


@transaction.atomic
def give_roles(user: User, roles: Mapping[str, Role], actor: User | str) -> None:
    """Make *roles*, by the tenants' names, the roles of *user*; others end. Tenants that do not exist are left out."""
    before = dict(user.memberships.values_list("tenant__name", "role"))
    user.memberships.exclude(tenant__name__in=roles).delete()
    for tenant in Tenant.objects.filter(name__in=roles):
        Membership.objects.update_or_create(user=user, tenant=tenant, defaults={"role": roles[tenant.name]})
    after = dict(user.memberships.values_list("tenant__name", "role"))
    if after != before:
        record("user.roles_changed", user, actor=actor, before={"roles": before}, after={"roles": after})


@transaction.atomic
def set_password(user: User, password: str, actor: User, reason: str = "") -> None:
    """Set the password by which *user* signs in. Raises ValidationError for a weak one."""
    guard_user(user, actor, False)
    validate_password(password, user)
    user.set_password(password)
    user.save(update_fields=["password"])
    record("user.password_changed", user, actor=actor, reason=reason, severity=Severity.WARNING)


@transaction.atomic
def create_sign_in_link(
    user: User, *, lifetime: timedelta = SIGN_IN_LINK_LIFETIME, actor: User | str = "pilothouse"
) -> str:
    """Return a token that signs *user* in once within *lifetime*, at `/sign-in/<token>/`; only its SHA-256 is stored."""
    token = secrets.token_urlsafe(32)
    expires_at = timezone.now() + lifetime
    SignInLink.objects.create(user=user, sha256=hash_secret(token), expires_at=expires_at)
    record("sign_in_link.created", user, actor=actor, after={"expires_at": expires_at.isoformat()})
    return token


@transaction.atomic
def use_sign_in_link(token: str) -> User | None:
    """Return the user of *token*; None if it is unknown, used or expired, or the user is inactive.

    The row is claimed by one update, so that of two simultaneous uses one alone succeeds.
    """
    now = timezone.now()
    live = SignInLink.objects.filter(
        sha256=hash_secret(token),
        used_at__isnull=True,
        expires_at__gt=now,
        user__is_active=True,
        user__service_role="",
    )
    link = live.select_related("user").first()
    if link is None or not live.filter(pk=link.pk).update(used_at=now):
        return None
    record("sign_in_link.used", link.user, actor=link.user)
    return link.user
