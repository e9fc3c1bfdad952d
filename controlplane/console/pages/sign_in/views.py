"""Signing in, by password or by one-time link, and out."""

from django.conf import settings
from django.contrib.auth import authenticate, login, logout
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render, resolve_url
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts.services import use_sign_in_link
from controlplane.console.access import lockout

BACKEND = "django.contrib.auth.backends.ModelBackend"
SINGLE_SIGN_ON = settings.OIDC_NAME if settings.SINGLE_SIGN_ON else ""


def wanted(request: HttpRequest) -> str:
    """Return the page after sign-in: `next`, if it is on this site."""
    url = request.POST.get("next") or request.GET.get("next") or ""
    safe = url_has_allowed_host_and_scheme(url, allowed_hosts={request.get_host()}, require_https=request.is_secure())
    return url if safe else resolve_url(settings.LOGIN_REDIRECT_URL)


@sensitive_post_parameters("password")
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    if request.method != "POST" and request.user.is_authenticated:
        return redirect(wanted(request))
    context = {"next": wanted(request), "username": "", "error": "", "single_sign_on": SINGLE_SIGN_ON}
    if request.method != "POST":
        return render(request, "console/sign_in/sign_in.html", context)
    username, address = request.POST.get("username", "")[:150], lockout.address_of(request)
    context["username"] = username
    if lockout.is_locked(username, address):
        minutes = int(lockout.WINDOW.total_seconds() // 60)
        context["error"] = (
            f"Too many sign-ins failed. Try again in {minutes} minutes, or ask an admin for a sign-in link."
        )
        return render(request, "console/sign_in/sign_in.html", context, status=429)
    user = authenticate(request, username=username, password=request.POST.get("password", ""))
    if user is None:
        lockout.note_failure(username, address)
        context["error"] = "Wrong user name or password."
        return render(request, "console/sign_in/sign_in.html", context, status=401)
    login(request, user)
    lockout.note_success(user, address)
    return redirect(wanted(request))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in_by_link(request: HttpRequest, token: str) -> HttpResponse:
    """A GET shows a button, so that a mail scanner or a preview that opens the link does not use it up; the POST uses it."""
    if request.method != "POST":
        return render(request, "console/sign_in/sign_in_link.html", {"token": token, "used": False})
    user = use_sign_in_link(token)
    if user is None:
        return render(request, "console/sign_in/sign_in_link.html", {"token": token, "used": True}, status=410)
    login(request, user, backend=BACKEND)
    return redirect(wanted(request))


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    logout(request)
    return redirect("console:sign-in")
