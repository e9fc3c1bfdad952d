from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("planning", "0002_drop_comparisons")]

    operations = [migrations.RemoveField("scalingpolicy", "memory")]
