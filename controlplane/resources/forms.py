"""Forms of rows of a kind, for the admin and for dialogs of the console; the inventory's services check and save them."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet

from controlplane.accounts.models import ApiKey, BudgetKind, Role, Tenant, User
from controlplane.accounts.services import set_password
from controlplane.alerts.models import Condition
from controlplane.events.models import Severity
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import MEMBERSHIP, Kind
from controlplane.fleet.models import GpuType, Price, PriceOf, SloClass
from controlplane.resources.filters import every
from controlplane.resources.names import model_names
from controlplane.usage.prices import FIELDS, set_price


def _shown(show: Any, value: Any) -> Any:
    """Return *value* for its field; nothing for none."""
    return "" if value is None else show(value)


class KindForm(forms.ModelForm[Any]):
    """Form of a row; the services check it, while its instance stays as it was read."""

    kind: ClassVar[Kind]
    user: ClassVar[User]
    read_at: ClassVar[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in self.kind.optional & self.fields.keys():
            self.fields[name].required = False
        for name in self.kind.secret & self.fields.keys():
            field: Any = self.fields[name]
            self.initial[name], field.required = None, False
            removes = "{}" if isinstance(field, forms.JSONField) else "-"
            field.help_text += f" An empty field keeps what is set; {removes} removes it." if self.instance.pk else ""
            if isinstance(field, forms.JSONField):
                field.prepare_value = partial(_shown, field.prepare_value)  # type: ignore[method-assign]
            else:
                field.widget = forms.PasswordInput(attrs={"autocomplete": "new-password"})

    def _post_clean(self) -> None:
        if self.errors:
            return
        values = {name: self._named(name) for name in self.cleaned_data if name in (self._meta.fields or ())}
        reason = self.cleaned_data.get("reason", "")
        try:
            if self.instance.pk:
                changes = {name: values[name] for name in self.changed_data if name in values}
                self.instance = services.change(
                    self.kind, self.instance, changes, self.user, reason, read_at=self.read_at
                )
            else:
                left_out = self.kind.secret | self.kind.optional
                values = {name: value for name, value in values.items() if name not in left_out or value is not None}
                self.instance = services.create(self.kind, self.values(values), self.user, reason)
        except ValidationError as error:
            named = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
            for name, texts in named.items():
                self.add_error(name if name in self.fields else None, texts)
        except ValueError as error:
            self.add_error(None, str(error))

    def values(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a new row."""
        return named

    def _named(self, name: str) -> Any:
        value, by = self.cleaned_data[name], self.kind.by.get(name, "name")
        if name in self.kind.secret and value == "-":
            return ""
        if isinstance(value, QuerySet):
            return [getattr(row, by) for row in value]
        return getattr(value, by) if isinstance(value, Model) and name in self.kind.named else value

    def _save_m2m(self) -> None:
        """The services have saved it."""


class ReasonedForm(KindForm):
    """Form of a dialog: it asks for the reason, too."""

    reason = forms.CharField(
        label="Reason, kept with the event", max_length=255, widget=forms.TextInput(attrs={"autocomplete": "off"})
    )


def dialog_form(kind: Kind, row: Any, user: User, read_at: str, base: type[KindForm] = ReasonedForm) -> type[KindForm]:
    """Return the form of *row*, or of a new one; what is fixed is asked for of a new one alone."""
    own = kind.fields if row is not None else (*kind.key, *kind.fixed, *kind.fields)
    names = tuple(dict.fromkeys(own))
    made: Any = forms.modelform_factory(kind.model, form=base, fields=names)
    return cast("type[KindForm]", type(made)(made.__name__, (made,), {"kind": kind, "user": user, "read_at": read_at}))


class RuleForm(ReasonedForm):
    """An alert rule: of one model or class, or of all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        classes = SloClass.objects.values_list("name", flat=True)
        self.fields["model"].widget = forms.Select(choices=every("models", model_names()))
        self.fields["slo_class"].widget = forms.Select(choices=every("classes", classes))
        shown = {"placeholder": self.instance.receivers_shown, "autocomplete": "off", "class": "long"}
        self.fields["receivers"].widget = forms.TextInput(attrs=shown)
        self.fields["severity"].choices = [("", "By how bad it is"), *Severity.choices]  # type: ignore[attr-defined]
        if "condition" in self.fields:
            self.fields["condition"].choices = [("", "Choose…"), *Condition.choices]  # type: ignore[attr-defined]
        labels = {"window_s": "Judged over (s)", "for_s": "Open after (s)", "repeat_hours": "Repeat every (h)"}
        for name, label in labels.items():
            self.fields[name].label = label


class BudgetForm(ReasonedForm):
    """A budget of a key, a tenant, a model, or a combination."""

    class Meta:
        labels: ClassVar = {"api_key": "API key", "soft": "Warn at", "hard": "Stop at", "kind": "Limits"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if "api_key" not in self.fields:  # what it is of stays
            return
        keys: Any = self.fields["api_key"]
        self.fields["kind"].choices = [("", "Choose…"), *BudgetKind.choices]  # type: ignore[attr-defined]
        keys.queryset = ApiKey.objects.filter(revoked_at=None).select_related("tenant")
        keys.label_from_instance = lambda key: f"{key} of {key.tenant}"
        keys.empty_label, self.fields["tenant"].empty_label = "All keys", "All, or that of the key"  # type: ignore[attr-defined]
        self.fields["model"].widget = forms.Select(choices=every("models", model_names()))
        for name in ("tenant", "model"):
            self.fields[name].help_text = ""


NONE = ("", "No access")


class UserForm(ReasonedForm):
    """A person: the account, a new password, and a role in each of their tenants."""

    password = forms.CharField(
        label="New password",
        required=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Empty: as it is; a new user signs in by link or single sign-on.",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["is_active"].help_text = "Who is not cannot sign in; open sessions end."
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


class PriceForm(forms.ModelForm[Price]):
    """A price from a date on."""

    user: ClassVar[User]

    class Meta:
        model = Price
        fields = ("of", "name", "amount", "from_at", "reason")
        labels = {"of": "Price of", "name": "GPU type or SLO class", "reason": "Reason, kept with the event"}
        help_texts = {
            "amount": "Dollars an hour of one GPU; of an SLO class a factor. Empty: no spot price.",
            "from_at": "YYYY-MM-DD HH:MM, a whole quarter of an hour; what is counted since is priced again. Empty: now.",
        }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        groups: list[tuple[str, Any]] = [("GPU types", GpuType), ("SLO classes", SloClass)]
        named = [(title, [(row.name, row.title) for row in of._default_manager.all()]) for title, of in groups]
        self.fields["name"] = forms.ChoiceField(label=self.fields["name"].label, choices=named)
        self.fields["of"].choices = [(of.value, of.label) for of in PriceOf if of in FIELDS]  # type: ignore[attr-defined]
        self.fields["from_at"].required = False

    def _post_clean(self) -> None:
        if self.errors:
            return
        try:
            self.instance = set_price(Price(**self.cleaned_data), self.user).price
        except ValidationError as error:
            for name, texts in error.message_dict.items():
                self.add_error(name if name in self.fields else None, texts)
