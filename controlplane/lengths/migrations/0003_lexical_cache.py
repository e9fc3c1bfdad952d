"""The cache of near prompts is called lexical, which it is: rows that were written by its old name take the new one."""

from typing import Any

from django.db import migrations, models

OLD, NEW = "semantic cache", "lexical cache"


def rename(apps: Any, old: str, new: str) -> None:
    apps.get_model("lengths", "LengthMinute").objects.filter(predictor=old).update(predictor=new)
    apps.get_model("lengths", "LengthSample").objects.filter(predicted_by=old).update(predicted_by=new)


def forward(apps: Any, schema_editor: Any) -> None:
    rename(apps, OLD, NEW)


def back(apps: Any, schema_editor: Any) -> None:
    rename(apps, NEW, OLD)


class Migration(migrations.Migration):
    dependencies = [("lengths", "0002_sample_conversations")]

    operations = [
        migrations.AlterField(
            model_name="lengthminute",
            name="predictor",
            field=models.CharField(
                help_text="cache, lexical cache, prior, a version, or its shadow.", max_length=40
            ),
        ),
        migrations.AlterField(
            model_name="lengthsample",
            name="predicted_by",
            field=models.CharField(help_text="cache, lexical cache, prior, or a version.", max_length=40),
        ),
        migrations.RunPython(forward, back),
    ]
