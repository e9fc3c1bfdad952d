"""A scenario that is simulated by itself is a what-if of one future: the results of earlier runs are dropped."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("simulation", "0001_simulation_runs")]

    operations = [migrations.DeleteModel(name="SimulationRun")]
