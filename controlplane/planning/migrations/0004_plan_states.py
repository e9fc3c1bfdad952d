"""`applied` was said of three things: a plan that an operator approved and that was carried out, one that an automatic
strategy followed, and one that asked for nothing. Each has its own state now."""

from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps
from django.db.models import F
from django.utils import timezone

PLANNER = "planner"  # who decides about plans of automatic strategies


def split(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    plans = apps.get_model("planning", "ScalingPlan").objects
    now = timezone.now()
    plans.filter(status="failed").update(status="expired", carried_out_at=None)
    applied = plans.filter(status="applied")
    applied.filter(note__contains="could not be added in time").update(status="expired", carried_out_at=None)
    applied.exclude(decided_by=PLANNER).update(status="carried_out")
    newest = {}
    for pk, model, targets, valid_until in list(
        applied.order_by("pk").values_list("pk", "model", "targets", "valid_until")
    ):
        if not any(target["target"] != target["present"] for target in targets):
            plans.filter(pk=pk).update(status="carried_out")
            continue
        plans.filter(pk=pk).update(status="superseded", carried_out_at=None)
        newest[model] = (pk, valid_until)
    for pk, valid_until in newest.values():
        plans.filter(pk=pk).update(status="in_force" if valid_until > now else "expired")


def join(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    plans = apps.get_model("planning", "ScalingPlan").objects
    plans.filter(status__in=["in_force", "carried_out"]).update(status="applied")
    plans.filter(status="applied", carried_out_at=None).update(carried_out_at=F("decided_at"))
    plans.filter(status="in_progress").update(status="approved")
    plans.filter(status="expired").update(status="failed")


STATES = [
    ("advice", "Advice"),
    ("shadow", "Shadow"),
    ("approved", "Approved"),
    ("in_progress", "In progress"),
    ("in_force", "In force"),
    ("carried_out", "Carried out"),
    ("rejected", "Rejected"),
    ("superseded", "Superseded"),
    ("expired", "Expired"),
]


class Migration(migrations.Migration):
    dependencies = [
        ("planning", "0003_forecast_by_class"),
    ]

    operations = [
        migrations.RenameField("scalingplan", "applied_at", "carried_out_at"),
        migrations.AlterField(
            "scalingplan",
            "carried_out_at",
            models.DateTimeField(
                blank=True, help_text="When its targets were reached; empty while they are not.", null=True
            ),
        ),
        migrations.AlterField(
            "scalingplan",
            "targets",
            models.JSONField(
                default=list,
                help_text="By region and GPU type: region, gpu_type, present, target, demand_tokens_per_s, reason; once"
                " approved, left (instances still to be added, or below 0 taken away) and obstacle.",
            ),
        ),
        migrations.AlterField(
            "scalingplan",
            "status",
            models.CharField(choices=STATES, db_index=True, default="advice", max_length=12),
        ),
        migrations.AlterField(
            "scalingpolicy",
            "mode",
            models.CharField(
                choices=[
                    ("off", "Off: only the reactive floor"),
                    ("shadow", "Shadow: plans are made and compared, never carried out"),
                    ("ask", "Ask: an operator approves each plan"),
                    ("auto", "Auto: the strategy follows plans by itself"),
                ],
                default="shadow",
                max_length=8,
            ),
        ),
        migrations.RunPython(split, join),
    ]
