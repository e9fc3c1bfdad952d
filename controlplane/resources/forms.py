"""Forms of rows of a kind, for the admin and for dialogs of the console; the inventory's services check and save them."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet

from controlplane.accounts.models import User
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import Kind


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
            field.help_text += " An empty field keeps what is set; - or {} removes it."
            if isinstance(field, forms.JSONField):
                field.prepare_value = partial(_shown, field.prepare_value)  # type: ignore[method-assign]
            else:
                field.widget = forms.PasswordInput(attrs={"autocomplete": "new-password"})

    def _post_clean(self) -> None:
        if self.errors:
            return
        values = {name: self._named(name) for name in self.cleaned_data if name in self._meta.fields}
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
    return type(made)(made.__name__, (made,), {"kind": kind, "user": user, "read_at": read_at})
