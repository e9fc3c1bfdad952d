import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("applications", "0002_runs_reported")]

    operations = [
        migrations.AddField(
            "application",
            "learns_from",
            models.DateTimeField(
                blank=True,
                help_text="Runs that ended before are not in its demand graph: a version was restored then.",
                null=True,
            ),
        ),
        migrations.AddField(
            "application",
            "frozen_at",
            models.DateTimeField(
                blank=True,
                help_text="Runs that ended later are recorded and not learned; empty while it learns.",
                null=True,
            ),
        ),
        migrations.AlterField(
            "applicationrun",
            "outcome",
            models.CharField(
                blank=True,
                choices=[
                    ("ended", "Ended"),
                    ("done", "Done"),
                    ("failed", "Failed"),
                    ("cancelled", "Cancelled"),
                    ("abandoned", "Abandoned"),
                    ("stopped", "Stopped"),
                ],
                default="",
                max_length=16,
            ),
        ),
        migrations.CreateModel(
            "GraphVersion",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("made_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("made_by", models.CharField(max_length=150)),
                ("why", models.CharField(max_length=255)),
                ("records", models.PositiveIntegerField(help_text="Runs that it is learned from.")),
                (
                    "error_s",
                    models.FloatField(
                        blank=True,
                        help_text="Mean error of predictions of what its left-out runs still needed (s).",
                        null=True,
                    ),
                ),
                (
                    "needed_s",
                    models.FloatField(blank=True, help_text="Mean of what these runs needed (s).", null=True),
                ),
                ("size_bytes", models.PositiveIntegerField(help_text="Of its JSON form.")),
                ("graph", models.BinaryField(help_text="Its JSON form, compressed by zlib.")),
                (
                    "application",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="applications.application",
                    ),
                ),
            ],
            options={
                "ordering": ["-number"],
                "constraints": [
                    models.UniqueConstraint(fields=("application", "number"), name="one_version_of_a_number")
                ],
            },
        ),
    ]
