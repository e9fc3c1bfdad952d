"""Single sign-on by OpenID Connect: allauth asks the issuer who it is, and this says who gets in, with which roles.

Off unless an issuer is configured. An account is known by the issuer's subject alone, never by a name or a mail address that
it says: those of people with a password cannot be taken over.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from django.conf import settings
from django.contrib.auth import login
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render, resolve_url

from controlplane.accounts.models import Role, User
from controlplane.accounts.services import give_roles
from controlplane.events.models import Severity
from controlplane.events.services import record

ACTOR = "single sign-on"
BACKEND = "django.contrib.auth.backends.ModelBackend"


class Adapter(DefaultSocialAccountAdapter):  # type: ignore[misc] # allauth has no types
    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        """Sign the person in whom the issuer has named, or say why not: nothing else of allauth follows."""
        raise ImmediateHttpResponse(signed_in(request, sociallogin))

    def on_authentication_error(self, request: HttpRequest, provider: Any, error: Any = None, **more: Any) -> None:
        raise ImmediateHttpResponse(_refused(request, f"Your {settings.OIDC_NAME} did not let you in ({error})."))


def signed_in(request: HttpRequest, sociallogin: SocialLogin) -> HttpResponse:
    """Sign in the person of *sociallogin* with the roles of their groups."""
    said = sociallogin.account.extra_data
    claims = {**said.get("id_token", {}), **said.get("userinfo", {})}
    roles = roles_of(groups_of(claims))
    with transaction.atomic():
        user = sociallogin.user
        if not sociallogin.is_existing:
            if not roles:
                return _without_role(request, claims)
            user.username = _name_of(claims, sociallogin.account.uid)
            user.set_unusable_password()
            sociallogin.email_addresses = []
            sociallogin.save(request)
            record("user.created", user, actor=ACTOR, after={"username": user.username, "email": user.email})
        if not user.is_active:
            return _refused(request, "This account is closed.")
        give_roles(user, roles, ACTOR)
        if not roles:
            return _without_role(request, claims)
        record("sign_in.done", user, actor=user, inputs={"by": ACTOR})
    login(request, user, backend=BACKEND)
    return redirect(sociallogin.get_redirect_url(request) or resolve_url(settings.LOGIN_REDIRECT_URL))


def groups_of(claims: Mapping[str, Any]) -> list[str]:
    """Return the groups that *claims* name."""
    value: Any = claims
    for part in settings.OIDC_GROUPS_CLAIM.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return [value] if isinstance(value, str) else [str(each) for each in value or ()]


def roles_of(groups: list[str]) -> dict[str, Role]:
    """Return the highest role in each tenant that *groups* give."""
    roles: dict[str, Role] = {}
    for group in groups:
        for tenant, name in settings.OIDC_GROUP_ROLES.get(group, ()):
            roles[tenant] = max(Role(name), roles.get(tenant, Role.VIEWER), key=lambda role: role.rank)
    return roles


def _name_of(claims: Mapping[str, Any], subject: str) -> str:
    """Return a user name that nobody has."""
    name = str(claims.get("preferred_username") or claims.get("email") or subject)[:120]
    taken = User.objects.filter(username__iexact=name).exists()
    return f"{name}-{hashlib.sha256(subject.encode()).hexdigest()[:8]}" if taken else name


def _without_role(request: HttpRequest, claims: Mapping[str, Any]) -> HttpResponse:
    groups = ", ".join(groups_of(claims))[:200] or "none"
    reason = f"No group of theirs has a role here: {groups}"
    record("sign_in.refused", actor=ACTOR, reason=reason, severity=Severity.WARNING)
    return _refused(request, "None of your groups has a role in Pilothouse. Ask an admin for one.")


def _refused(request: HttpRequest, error: str) -> HttpResponse:
    context = {"next": "/", "username": "", "error": error, "single_sign_on": settings.OIDC_NAME}
    return render(request, "console/sign_in/sign_in.html", context, status=403)
