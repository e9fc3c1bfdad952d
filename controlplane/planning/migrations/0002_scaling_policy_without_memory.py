from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("planning", "0001_squashed")]

    operations = [migrations.RemoveField("scalingpolicy", "memory")]
