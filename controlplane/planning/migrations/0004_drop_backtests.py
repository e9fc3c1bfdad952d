from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("planning", "0003_scaling_policy_without_memory")]

    operations = [migrations.DeleteModel(name="Backtest")]
