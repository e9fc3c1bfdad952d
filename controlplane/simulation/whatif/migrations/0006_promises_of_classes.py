from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("whatif", "0005_submitted_at_once")]

    operations = [
        migrations.RemoveField("whatif", "slo_target"),
        migrations.RemoveField("future", "first_difference"),
        migrations.RemoveField("futureseed", "log"),
    ]
