from typing import Any, Final

from django.db import migrations, models

STATE: Final[dict[str, Any]] = {
    "choices": [
        ("queued", "Queued"), ("running", "Running"), ("done", "Done"), ("cancelled", "Cancelled"), ("failed", "Failed"),
    ],
    "db_index": True, "default": "queued", "max_length": 11,
}  # fmt: skip


def cancel_drafts(apps: Any, schema_editor: Any) -> None:
    apps.get_model("whatif", "WhatIf").objects.filter(state="draft").update(state="cancelled")


class Migration(migrations.Migration):
    dependencies = [("whatif", "0004_less_is_kept")]
    operations = [
        migrations.RunPython(cancel_drafts, migrations.RunPython.noop, elidable=True),
        migrations.RemoveField("whatif", "chosen"),
        migrations.AlterField("whatif", "state", models.CharField(**STATE)),
        migrations.AlterField("futureseed", "state", models.CharField(**STATE)),
        migrations.AlterField(
            "whatif",
            "plan",
            models.JSONField(blank=True, default=dict, help_text="What was made of a future; empty: nothing."),
        ),
        migrations.AlterField(
            "whatif", "start", models.JSONField(blank=True, default=dict, help_text="As `start.Start`.")
        ),
    ]
