from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('gateway', '0014_models_asked_for'),
    ]

    operations = [
        migrations.AddField(
            model_name='ledgerrow',
            name='cached_tokens',
            field=models.PositiveIntegerField(help_text='Prompt tokens in the prefix cache, as the instance reports; empty: it does not.', null=True),
        ),
        migrations.AddField(
            model_name='ledgerrow',
            name='expected_cached_tokens',
            field=models.PositiveIntegerField(help_text='Prompt tokens that the router expected there; empty: it weighs no prefixes.', null=True),
        ),
    ]
