"""Error pages in the console's look. The 500 page needs neither database nor session, since those may be what broke."""

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template import loader

from controlplane import __version__


def forbidden(request: HttpRequest, exception: PermissionDenied | None = None) -> HttpResponse:
    return render(request, "console/errors/403.html", {"why": str(exception or "")}, status=403)


def forged(request: HttpRequest, reason: str = "") -> HttpResponse:
    """A form came without its token: usually from a page that was open since before signing in."""
    why = "This form is out of date. Open the page again and send it once more."
    return render(request, "console/errors/403.html", {"why": why}, status=403)


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return render(request, "console/errors/404.html", status=404)


def unavailable(request: HttpRequest, why: str) -> HttpResponse:
    """The database takes no change at present; like the 500 page, this one needs nothing of it."""
    page = loader.render_to_string("console/errors/503.html", {"version": __version__, "why": why})
    return HttpResponse(page, status=503, headers={"Retry-After": "2"})


def broken(request: HttpRequest) -> HttpResponse:
    return HttpResponse(loader.render_to_string("console/errors/500.html", {"version": __version__}), status=500)
