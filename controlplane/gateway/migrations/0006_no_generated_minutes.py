from typing import Any

from django.db import migrations


def delete_generated(apps: Any, schema_editor: Any) -> None:
    apps.get_model("gateway", "MinuteRow").objects.filter(generated=True).delete()


class Migration(migrations.Migration):
    dependencies = [("gateway", "0005_drop_capacity_steps")]

    operations = [
        migrations.RunPython(delete_generated, migrations.RunPython.noop),
        migrations.RemoveIndex(model_name="minuterow", name="generated_minutes"),
        migrations.RemoveField(model_name="minuterow", name="generated"),
    ]
