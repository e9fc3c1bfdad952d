from typing import Any

import django.core.validators
from django.db import migrations, models


def forget_zeros(apps: Any, schema_editor: Any) -> None:
    """A price that was not known was kept as 0."""
    apps.get_model("fleet", "Donation").objects.filter(spot_usd_per_hour=0).update(spot_usd_per_hour=None)


def write_zeros(apps: Any, schema_editor: Any) -> None:
    apps.get_model("fleet", "Donation").objects.filter(spot_usd_per_hour=None).update(spot_usd_per_hour=0)


class Migration(migrations.Migration):
    dependencies = [("fleet", "0022_orders_by_application")]

    operations = [
        migrations.AlterField(
            model_name="donation",
            name="spot_usd_per_hour",
            field=models.DecimalField(
                blank=True,
                decimal_places=4,
                help_text="Spot price of all its GPUs when it was donated, which it earns for as long as it is donated; "
                "null where its GPU type had none.",
                max_digits=10,
                null=True,
                validators=[django.core.validators.MinValueValidator(0)],
            ),
        ),
        migrations.RunPython(forget_zeros, write_zeros),
    ]
