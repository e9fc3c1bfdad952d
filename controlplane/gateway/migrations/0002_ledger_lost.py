from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("gateway", "0001_squashed")]

    operations = [
        migrations.AddField(
            "ledgerrow",
            "lost",
            models.BooleanField(
                default=False,
                help_text="An execution of a batch line whose answer was not kept: its tenant does not pay for it.",
            ),
        ),
    ]
