"""One version of the length model answers for all models."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0007_names_may_end_in_bundle")]

    operations = [migrations.RemoveField("Model", "length_model")]
