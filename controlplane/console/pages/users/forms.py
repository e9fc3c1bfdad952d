"""One form of a person: the account, a new password, and a role in each of their tenants."""

from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from controlplane.accounts.models import Role, Tenant
from controlplane.accounts.services import set_password
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import MEMBERSHIP
from controlplane.resources.forms import ReasonedForm

NONE = ("", "No access")


class UserForm(ReasonedForm):
    password = forms.CharField(
        label="New password",
        required=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Empty: as it is; a new user signs in by link or single sign-on.",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.members = list(self.instance.memberships.select_related("tenant")) if self.instance.pk else []
        for row in self.members:
            self.fields[f"role-{row.pk}"] = _role(f"Role in {row.tenant}", row.role)
        rest = Tenant.objects.exclude(pk__in=[row.tenant_id for row in self.members])
        self.fields["tenant"] = forms.ModelChoiceField(
            rest, required=False, label="Add to tenant", empty_label="None", help_text=OPERATES
        )
        self.fields["role"] = _role("With the role", Role.VIEWER)
        self.order_fields([name for name in self.fields if name != "reason"] + ["reason"])

    def _post_clean(self) -> None:
        super()._post_clean()
        if self.errors:
            return
        given = self.cleaned_data
        try:
            for row in self.members:
                role = given[f"role-{row.pk}"]
                if not role:
                    services.delete(MEMBERSHIP, row, self.user, given["reason"])
                elif role != row.role:
                    services.change(MEMBERSHIP, row, {"role": role}, self.user, given["reason"])
            if given["tenant"] and given["role"]:
                names = {"user": self.instance.username, "tenant": given["tenant"].name, "role": given["role"]}
                services.create(MEMBERSHIP, names, self.user, given["reason"])
            if given["password"]:
                set_password(self.instance, given["password"], self.user, given["reason"])
        except ValidationError as error:
            self.add_error(None, error.messages)


OPERATES = "Roles in a tenant that operates the fleet count for the whole fleet."


def _role(label: str, initial: str) -> forms.ChoiceField:
    return forms.ChoiceField(label=label, choices=[NONE, *Role.choices], required=False, initial=initial)
