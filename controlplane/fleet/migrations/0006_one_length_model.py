"""One version of the length model answers for all models."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0005_names")]

    operations = [migrations.RemoveField("Model", "length_model")]
