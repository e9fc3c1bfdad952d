from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("batches", "0001_squashed")]

    operations = [migrations.AddField("batch", "epoch", models.PositiveIntegerField(default=0))]
