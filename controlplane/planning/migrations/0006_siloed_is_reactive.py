"""`siloed` is only simulated: a fleet has one endpoint for all work of a model in a region, where it is `reactive`."""

from typing import Any

from django.db import migrations


def to_reactive(apps: Any, schema_editor: Any) -> None:
    apps.get_model("planning", "ScalingPolicy").objects.filter(strategy="siloed").update(strategy="reactive")


class Migration(migrations.Migration):
    dependencies = [("planning", "0005_forecast_of_interactive")]

    operations = [migrations.RunPython(to_reactive, migrations.RunPython.noop)]
