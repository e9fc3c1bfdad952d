from typing import Any

from django.db import migrations


def note_weights(apps: Any, schema_editor: Any) -> None:
    """Weights are in the regions where instances that Pilothouse started serve."""
    instances = apps.get_model("fleet", "Instance").objects.filter(state__in=["ready", "draining"])
    places = instances.exclude(launcher="external").order_by().values_list("deployment__model", "deployment__region")
    weights = apps.get_model("fleet", "Weights").objects
    for model, region in places.distinct():
        weights.get_or_create(model_id=model, region_id=region, defaults={"reason": "an instance serves there"})


class Migration(migrations.Migration):
    dependencies = [("fleet", "0018_spot_pool_and_weights")]

    operations = [migrations.RunPython(note_weights, migrations.RunPython.noop)]
