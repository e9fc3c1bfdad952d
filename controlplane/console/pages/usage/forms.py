"""The form of a price from a date on."""

from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError

from controlplane.accounts.models import User
from controlplane.fleet.models import GpuType, Price, PriceOf, SloClass
from controlplane.usage.prices import FIELDS, set_price


class PriceForm(forms.ModelForm[Price]):
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
        groups = [("GPU types", GpuType), ("SLO classes", SloClass)]
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
