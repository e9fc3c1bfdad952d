"""Trouble of jobs and parts is an alert; `noticed` remembered their events."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("jobs", "0001_initial")]

    operations = [migrations.RemoveField(model_name="jobrow", name="noticed")]
