import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps


def remember_tokens(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Servers that run now are asked with their deployment's token, as until now."""
    Instance = apps.get_model("fleet", "Instance")
    running = Instance.objects.exclude(launcher="external").exclude(state__in=["stopped", "provisioning"])
    for row in running.exclude(deployment__api_key="").select_related("deployment"):
        Instance.objects.filter(pk=row.pk).update(api_key=row.deployment.api_key)


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0006_requests_ahead"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance",
            name="api_key",
            field=models.CharField(
                blank=True,
                editable=False,
                help_text="The token that its server was started with; not shown.",
                max_length=255,
                verbose_name="API key",
            ),
        ),
        migrations.AddField(
            model_name="instance",
            name="launched_with",
            field=models.JSONField(
                blank=True,
                default=dict,
                editable=False,
                help_text="Settings that its server was started with, secrets as digests; empty: not known.",
            ),
        ),
        migrations.RunPython(remember_tokens, migrations.RunPython.noop),
        migrations.CreateModel(
            name="Rollout",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("in_progress", "In progress"),
                            ("succeeded", "Succeeded"),
                            ("failed", "Failed"),
                            ("cancelled", "Cancelled"),
                        ],
                        default="in_progress",
                        max_length=16,
                    ),
                ),
                ("actor", models.CharField(max_length=120)),
                ("reason", models.CharField(blank=True, max_length=255)),
                ("total", models.PositiveIntegerField(default=0, help_text="Instances that are kept while it lasts.")),
                (
                    "up_to_date",
                    models.PositiveIntegerField(
                        default=0, help_text="Instances that are ready with the present settings."
                    ),
                ),
                ("message", models.TextField(blank=True, help_text="What it does or waits for, or how it ended.")),
                ("started_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "deployment",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="rollouts", to="fleet.deployment"
                    ),
                ),
                (
                    "draining",
                    models.ForeignKey(
                        blank=True,
                        help_text="Has other settings, and is drained and stopped.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="fleet.instance",
                    ),
                ),
                (
                    "starting",
                    models.ForeignKey(
                        blank=True,
                        help_text="Started with the present settings, to become ready next.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="fleet.instance",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("state", "in_progress")),
                        fields=("deployment",),
                        name="one_rollout_per_deployment",
                    )
                ],
            },
        ),
    ]
