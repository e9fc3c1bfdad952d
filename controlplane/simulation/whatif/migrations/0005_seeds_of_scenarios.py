from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("whatif", "0004_decisions_side_by_side")]

    operations = [
        migrations.AlterField(model_name="futureseed", name="seed", field=models.PositiveBigIntegerField()),
    ]
