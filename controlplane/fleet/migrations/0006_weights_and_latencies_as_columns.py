from typing import Any

from django.db import migrations, models

import controlplane.fleet.models.hardware


def keep(apps: Any, schema_editor: Any) -> None:
    """Keep what the tables say in the new columns."""
    regions = {row.pk: row for row in apps.get_model("fleet", "Region").objects.all()}
    for row in apps.get_model("fleet", "RegionLatency").objects.all():
        regions[row.origin_id].latency_ms[regions[row.target_id].name] = row.latency_ms
    for region in regions.values():
        region.save(update_fields=["latency_ms"])
    for row in apps.get_model("fleet", "Weights").objects.filter(state="present").select_related("model"):
        row.model.weights_in.add(row.region_id)


class Migration(migrations.Migration):
    dependencies = [("fleet", "0005_names")]

    operations = [
        migrations.AlterField("weights", "model", models.ForeignKey("fleet.model", models.CASCADE, related_name="+")),
        migrations.AddField(
            "model",
            "weights_in",
            models.ManyToManyField(
                "fleet.region",
                blank=True,
                related_name="+",
                help_text="Regions that have its weights; a start elsewhere takes the time of a pull. Empty: not known, "
                "near.",
            ),
        ),
        migrations.AddField(
            "region",
            "latency_ms",
            controlplane.fleet.models.hardware.NumbersField(
                "latency (ms)",
                default=dict,
                blank=True,
                help_text="One-way network latency in ms, by name of another region; the same back unless that gives it "
                "too.",
            ),
        ),
        migrations.RunPython(keep, migrations.RunPython.noop),
        migrations.DeleteModel("Weights"),
        migrations.DeleteModel("RegionLatency"),
    ]
