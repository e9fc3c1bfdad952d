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
            name="address",
            field=models.CharField(blank=True, help_text="Where relays reach it; empty: they cannot.", max_length=255),
        ),
    ]
