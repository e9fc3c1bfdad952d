from typing import Any

from django.db import migrations, models


def settle(apps: Any, schema_editor: Any) -> None:
    apps.get_model("alerts", "Alert").objects.exclude(resolved_at=None).update(settled=True)


class Migration(migrations.Migration):
    dependencies = [("alerts", "0003_one_notion_of_alarm")]

    operations = [
        migrations.AddField(
            "alert",
            "settled",
            # The database fills it in for processes of the release before.
            models.BooleanField(
                default=False, db_default=False, help_text="Whether it stayed resolved, so that its end is sent."
            ),
        ),
        migrations.RunPython(settle, migrations.RunPython.noop),
    ]
