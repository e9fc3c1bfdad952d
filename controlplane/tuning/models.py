"""Values of settings that go before their defaults, for all models or for one."""

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.utils import timezone

from controlplane.tunable import PER_MODEL, Tunable


class Setting(models.Model):
    """The value of one setting in force; without a row, its default is."""

    name = models.CharField(max_length=60)
    model = models.ForeignKey(
        "fleet.Model",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="settings",
        help_text="Empty: for every model that has no value of its own.",
    )
    value: Any = models.JSONField()
    changed_at = models.DateTimeField(default=timezone.now, editable=False)
    changed_by = models.CharField(max_length=120, editable=False)

    class Meta:
        ordering = ["name", "model__name"]
        constraints = [
            models.UniqueConstraint(fields=["name", "model"], name="one_value_per_setting_and_model"),
            models.UniqueConstraint(
                fields=["name"], condition=models.Q(model=None), name="one_value_per_setting_of_all_models"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.model}" if self.model else self.name

    def clean(self) -> None:
        from controlplane.tuning.selectors import checked

        field = Tunable.model_fields.get(self.name)
        if field is None:
            raise ValidationError({"name": f"There is no setting {self.name!r}."})
        if self.model is not None and PER_MODEL not in field.metadata:
            raise ValidationError({"model": f"{self.name} has one value for all models."})
        self.value = checked(self.name, self.value, self.model.name if self.model else "")
