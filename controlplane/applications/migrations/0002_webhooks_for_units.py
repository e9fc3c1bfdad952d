"""Backends of units become addresses of webhooks; graph versions, costs of runs and records of prewarming go."""

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("applications", "0001_squashed")]

    operations = [
        migrations.DeleteModel(name="GraphVersion"),
        migrations.DeleteModel(name="PrewarmRow"),
        migrations.DeleteModel(name="RunCost"),
        migrations.DeleteModel(name="UnitBackend"),
        migrations.CreateModel(
            name="UnitBackend",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "name",
                    models.CharField(
                        help_text="As units name it in `backend`, such as python:3.11.",
                        max_length=80,
                        unique=True,
                        validators=[RegexValidator("^[A-Za-z0-9._:/-]+$", "Letters, digits or . _ : / -")],
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("container", "Container"), ("dnn", "DNN model")], default="container", max_length=16
                    ),
                ),
                (
                    "url",
                    models.CharField(
                        help_text="Is sent `warm` before a run will probably need the backend, `cool` once none does.",
                        max_length=500,
                        validators=[RegexValidator(r"^https?://[^\s/]+\S*$", "An address that begins with http:// or https://")],
                        verbose_name="URL",
                    ),
                ),
                (
                    "secret",
                    models.CharField(help_text="Signs what is sent (HMAC-SHA256). It is never shown.", max_length=200),
                ),
                (
                    "keep_alive_s",
                    models.FloatField(
                        default=300.0,
                        help_text="After so long without need it is sent `cool`.",
                        validators=[MinValueValidator(1.0), MaxValueValidator(86400.0)],
                        verbose_name="keep alive (s)",
                    ),
                ),
                ("active", models.BooleanField(default=True)),
            ],
            options={"ordering": ["name"]},
        ),
        migrations.RemoveField(model_name="application", name="frozen_at"),
        migrations.RemoveField(model_name="application", name="learns_from"),
        migrations.RemoveField(model_name="application", name="title"),
        migrations.RemoveField(model_name="applicationrun", name="plain_error_s"),
        migrations.RemoveField(model_name="unitreport", name="address"),
        migrations.RemoveField(model_name="unitreport", name="warm"),
    ]
