from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0004_budgets'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='allowed_models',
            field=models.JSONField(blank=True, default=list, help_text='Names that its requests may ask for: of models, adapters and weighted targets; empty: all.'),
        ),
    ]
