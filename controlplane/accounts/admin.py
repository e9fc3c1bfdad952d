"""Admin of users, tenants and their keys."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from django import forms
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.debug import sensitive_variables

from controlplane.accounts.models import ApiKey, Membership, Role, SignInLink, User
from controlplane.accounts.requests import NotedRequest, user_of
from controlplane.accounts.services import check_service_key, create_api_key, create_sign_in_link, revoke_api_key
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.selectors import allowed_models
from controlplane.resources.admin import AuditedAdmin, action_of, register, show
from controlplane.resources.budgets import BUDGETS
from controlplane.resources.keys import TENANTS
from controlplane.resources.resource import Operation

if TYPE_CHECKING:
    from django.contrib.admin.options import _FieldsetSpec

REVOKE = Operation(
    "revoke", revoke_api_key, "The gateway refuses these keys within seconds. This cannot be undone.", Role.ADMIN
)
admin.site.unregister(Group)  # rights come from memberships


@admin.register(User)
class UserAdmin(AuditedAdmin[User], DjangoUserAdmin[User]):
    view_role = Role.ADMIN
    list_display = ["username", "email", "roles", "is_active", "is_superuser", "last_login"]
    list_filter = ["is_active", "is_superuser", "memberships__role"]
    search_fields = ["username", "first_name", "last_name", "email"]
    filter_horizontal = []
    readonly_fields = ["last_login", "date_joined"]
    fieldsets = [
        (None, {"fields": ["username", "password"]}),
        ("Person", {"fields": ["first_name", "last_name", "email"]}),
        (
            "Access",
            {
                "fields": ["is_active", "is_superuser"],
                "description": "Rights come from memberships: a role in a tenant that operates the fleet "
                "counts for the whole fleet. A superuser has every right.",
            },
        ),
        ("Dates", {"fields": ["last_login", "date_joined"]}),
    ]
    actions = ["sign_in_link"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        return super().get_queryset(request).prefetch_related("memberships__tenant")

    @admin.display(description="memberships")
    def roles(self, user: User) -> str:
        return ", ".join(f"{membership.role} of {membership.tenant}" for membership in user.memberships.all()) or "none"

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> list[str]:
        """Only a superuser makes superusers."""
        fields = list(super().get_readonly_fields(request, obj))
        return fields if request.user.is_superuser else [*fields, "is_superuser"]

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Only superusers set a superuser's password."""
        if obj is not None and obj.is_superuser and not request.user.is_superuser:
            return False
        return super().has_change_permission(request, obj)

    has_delete_permission = has_change_permission

    @transaction.atomic
    def user_change_password(self, request: HttpRequest, id: str, form_url: str = "") -> HttpResponse:
        response = super().user_change_password(request, id, form_url)
        if request.method == "POST" and isinstance(response, HttpResponseRedirect):
            record("user.password_changed", User.objects.get(pk=id), actor=user_of(request), severity=Severity.WARNING)
        return response

    @admin.action(description="Make a sign-in link", permissions=["change"])
    def sign_in_link(self, request: HttpRequest, users: QuerySet[User]) -> HttpResponse | None:
        if users.count() != 1:
            self.message_user(request, "Choose one user: a link signs one person in.", "error")
            return None
        user = users.get()
        if user.is_superuser and not request.user.is_superuser:
            self.message_user(request, "Only a superuser makes a sign-in link for a superuser.", "error")
            return None
        link = reverse("console:sign-in-link", args=[create_sign_in_link(user, actor=user_of(request))])
        note = "It signs this user in once within 30 minutes, from any browser."
        return secret_page(request, self, request.build_absolute_uri(link), f"Sign-in link for {user}", note)


@admin.register(Membership)
class MembershipAdmin(AuditedAdmin[Membership]):
    list_display = ["user", "tenant", "role"]
    list_filter = ["role", "tenant"]
    list_select_related = ["user", "tenant"]
    search_fields = ["user__username", "tenant__name"]
    autocomplete_fields = ["user", "tenant"]


class ApiKeyForm(forms.ModelForm[ApiKey]):
    service_role = forms.ChoiceField(
        label="Role over the fleet",
        choices=[("", "None: inference, and reading"), *Role.choices],
        required=False,
        help_text="Makes a service key, which may do on /api what this role may. It has to expire.",
    )
    allowed_models = forms.CharField(
        label="Models",
        required=False,
        help_text="Names of models and adapters that its requests may ask for, with commas between; empty: all.",
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        if tenant := values.get("tenant"):
            try:
                names = values.get("allowed_models", "").split(",")
                values["allowed_models"] = allowed_models(names, tenant.pk)
            except ValidationError as error:
                self.add_error("allowed_models", error.messages)
        if (role := values.get("service_role")) and (tenant := values.get("tenant")):
            check_service_key(tenant, "", values.get("expires_at"), Role(role))
        return values


@admin.register(ApiKey)
class ApiKeyAdmin(AuditedAdmin[ApiKey]):
    form = ApiKeyForm
    list_display = [
        "name",
        "prefix",
        "tenant",
        "role",
        "usable",
        "created_at",
        "created_by",
        "expires_at",
        "last_used_at",
    ]
    list_filter = ["tenant", "account__service_role", ("revoked_at", admin.EmptyFieldListFilter), "created_at"]
    list_select_related = ["tenant", "created_by", "account"]
    search_fields = ["name", "prefix", "tenant__name"]
    autocomplete_fields = ["tenant"]
    actions = [action_of(REVOKE)]
    add_fieldsets: "ClassVar[_FieldsetSpec]" = [
        (
            None,
            {
                "fields": ["tenant", "name", "service_role", "expires_at", "allowed_models"],
                "description": "The key is shown once, on the next page.",
            },
        )
    ]
    fieldsets = [
        (None, {"fields": ["tenant", "name", "prefix", "role", "allowed_models", "usable"]}),
        ("Dates", {"fields": ["created_at", "created_by", "expires_at", "revoked_at", "last_used_at"]}),
    ]
    readonly_fields = ["prefix", "role", "usable", "created_at", "created_by", "revoked_at", "last_used_at"]

    @admin.display(boolean=True)
    def usable(self, key: ApiKey) -> bool:
        return key.usable

    def get_fieldsets(self, request: HttpRequest, obj: ApiKey | None = None) -> "_FieldsetSpec":
        return super().get_fieldsets(request, obj) if obj else self.add_fieldsets

    def has_change_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        """Keys are revoked, so that the ledger can always name them."""
        return False

    def save_model(self, request: HttpRequest, obj: ApiKey, form: forms.ModelForm[ApiKey], change: bool) -> None:
        noted = cast(NotedRequest, request)
        role = Role(given) if (given := form.cleaned_data["service_role"]) else None
        key, noted.new_secret = create_api_key(
            obj.tenant,
            obj.name,
            user_of(request),
            expires_at=obj.expires_at,
            role=role,
            allowed_models=obj.allowed_models,
        )
        obj.pk, obj.prefix, obj.sha256, obj.created_by = key.pk, key.prefix, key.sha256, key.created_by
        obj._state.adding = False

    def save_related(self, request: HttpRequest, form: forms.ModelForm[ApiKey], formsets: Any, change: bool) -> None:
        """The service has recorded the event."""

    def response_add(self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None) -> HttpResponse:
        note = "Copy it now: only its SHA-256 is stored, and it is not shown again."
        return secret_page(
            request, self, cast(NotedRequest, request).new_secret, f"API key {obj.name} of {obj.tenant}", note
        )


register(TENANTS)
register(BUDGETS, "__str__", "kind", "soft", "hard", "spent_usd", "stopped_at")
show(SignInLink, "user", "expires_at", "used_at", search=("user__username",), exclude=("sha256",), view_role=Role.ADMIN)


@sensitive_variables("secret", "context")
def secret_page(
    request: HttpRequest, model_admin: admin.ModelAdmin[Any], secret: str, title: str, note: str
) -> HttpResponse:
    """Answer the request that made *secret*: the only page with it, which the admin lets nobody store."""
    site, opts = model_admin.admin_site, model_admin.model._meta
    context = {**site.each_context(request), "opts": opts, "title": title, "secret": secret, "note": note}
    return TemplateResponse(request, "admin/secret.html", context)
