"""Users and access: who signs in, with which roles, and a link for who has no password."""

from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.services import create_sign_in_link, guard_user
from controlplane.console.access.roles import fleet_role
from controlplane.console.editing import edit
from controlplane.console.lists import list_page, viewer_of
from controlplane.resources.forms import UserForm
from controlplane.resources.users import USERS, people


@sensitive_post_parameters("password")
@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.ADMIN)
def users(request: HttpRequest) -> HttpResponseBase:
    editing = edit(request, USERS, UserForm)
    return editing if isinstance(editing, HttpResponse) else list_page(request, USERS, editing=editing, edits=True)


@never_cache
@require_POST
@fleet_role(Role.ADMIN)
@sensitive_variables("link")
def link(request: HttpRequest, pk: int) -> HttpResponse:
    """Show a link that signs the user in once: here alone."""
    user = get_object_or_404(people(viewer_of(request)), pk=pk, is_active=True)
    try:
        guard_user(user, user_of(request), False)
    except ValidationError as error:
        raise PermissionDenied(" ".join(error.messages)) from error
    link = reverse("console:sign-in-link", args=[create_sign_in_link(user, actor=user_of(request))])
    return render(request, "console/users/link.html", {"person": user, "link": request.build_absolute_uri(link)})
