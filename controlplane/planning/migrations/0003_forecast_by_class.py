from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('planning', '0002_policy_memory'),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='forecast',
            name='forecast_series',
        ),
        migrations.AddIndex(
            model_name='forecast',
            index=models.Index(fields=['model', 'region', 'quantity', 'slo_class', '-made_at'], name='forecast_series'),
        ),
    ]
