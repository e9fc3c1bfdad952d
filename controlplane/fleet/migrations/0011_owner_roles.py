import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("fleet", "0010_nodes")]

    operations = [
        migrations.AddField(
            model_name="owner",
            name="role",
            field=models.CharField(default="shard 1", help_text="A shard of models (`shard 1`), or `batches`.", max_length=40, unique=True),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="owner",
            name="moves",
            field=models.BooleanField(default=False, help_text="Its owner leaves it to another process that stands by."),
        ),
        migrations.AddField(
            model_name="model",
            name="shard",
            field=models.PositiveSmallIntegerField(default=1, help_text="Number of the shard of models whose dispatcher decides about its requests.", validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AddField(
            model_name="owner",
            name="address",
            field=models.CharField(blank=True, help_text="Where relays reach it; empty: they cannot.", max_length=255),
        ),
    ]
