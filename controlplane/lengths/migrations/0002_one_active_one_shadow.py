"""Errors without buckets of lengths, one shadow, and no version of kinds that are gone: the bundled trees answer."""

from typing import Any

from django.db import migrations, models
from django.db.models import Sum

KEY = ("minute", "model", "tenant", "predictor")
SUMS = ("requests", "predicted_tokens", "output_tokens", "absolute_error_tokens", "within_25", "within_50", "within_100",
        "below_median", "below_upper", "late")  # fmt: skip
GONE = ("student", "ssjf-cls-pairwise")


def merge(apps: Any, _editor: Any) -> None:
    minutes = apps.get_model("lengths", "LengthMinute").objects
    rows = list(minutes.order_by().values(*KEY).annotate(**{f"sum_{name}": Sum(name) for name in SUMS}))
    minutes.all().delete()
    make = apps.get_model("lengths", "LengthMinute")
    minutes.bulk_create(
        [
            make(**{name: row[name] for name in KEY}, **{name: row[f"sum_{name}"] for name in SUMS}, bucket_tokens=0)
            for row in rows
        ],
        batch_size=500,
    )


def reject(apps: Any, _editor: Any) -> None:
    versions = apps.get_model("lengths", "LengthVersion").objects
    versions.filter(kind__in=GONE).update(state="rejected", note="this kind is gone")
    shadows = versions.filter(state="shadow").order_by("-number").values_list("pk", flat=True)
    versions.filter(pk__in=list(shadows[1:])).update(state="rejected", note="there is one shadow")


class Migration(migrations.Migration):
    dependencies = [("lengths", "0001_squashed")]

    operations = [
        migrations.RunPython(merge, migrations.RunPython.noop),
        migrations.RunPython(reject, migrations.RunPython.noop),
        migrations.RemoveConstraint("LengthMinute", "one_length_row_per_minute_and_series"),
        migrations.RemoveField("LengthMinute", "bucket_tokens"),
        migrations.AddConstraint(
            "LengthMinute",
            models.UniqueConstraint(fields=KEY, name="one_length_row_per_minute_and_series"),
        ),
        migrations.RemoveField("LengthVersion", "shadow_since"),
        *(
            migrations.AlterField(model, name, models.CharField(help_text=text, max_length=40))
            for model, name, text in (
                ("LengthMinute", "predictor", "cache, lexical cache, prior, a version, or its shadow."),
                ("LengthSample", "predicted_by", "cache, lexical cache, prior, or a version."),
                ("LengthTraining", "kind", "A name in `forecasting.lengths`, such as trees."),
                ("LengthVersion", "kind", "A name in `forecasting.lengths`, such as trees."),
            )
        ),
    ]
