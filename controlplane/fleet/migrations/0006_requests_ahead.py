from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0005_servers"),
    ]

    operations = [
        migrations.AddField(
            model_name="deployment",
            name="requests_ahead_limit",
            field=models.PositiveSmallIntegerField(
                blank=True,
                help_text="Requests at the most that an instance is given beyond what it runs, so that no place stands empty for a round trip. Empty: as many as end there within a measured round trip. 0: none, the order is strict.",
                null=True,
                verbose_name="requests ahead",
            ),
        ),
    ]
