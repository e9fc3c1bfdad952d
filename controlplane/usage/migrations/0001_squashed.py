import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('usage', '0001_usage_hours'),
        ('usage', '0002_work'),
    ]

    initial = True

    dependencies = [
        ('accounts', '0001_squashed'),
    ]

    operations = [
        migrations.CreateModel(
            name='UsageMark',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('counted_until', models.DateTimeField()),
                ('ledger_pk', models.PositiveBigIntegerField(default=0)),
                ('seen_pk', models.PositiveBigIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name='UsageHour',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hour', models.DateTimeField(db_index=True)),
                ('model', models.CharField(max_length=160)),
                ('slo_class', models.CharField(blank=True, max_length=40, verbose_name='SLO class')),
                ('work', models.CharField(choices=[('interactive', 'Interactive'), ('non_interactive', 'Non-interactive'), ('batch', 'Batch lines'), ('opportunistic', 'Opportunistic'), ('idle', 'Idle')], default='interactive', max_length=16)),
                ('requests', models.PositiveBigIntegerField(default=0)),
                ('prompt_tokens', models.PositiveBigIntegerField(default=0)),
                ('output_tokens', models.PositiveBigIntegerField(default=0)),
                ('kv_token_s', models.FloatField(default=0.0, verbose_name='KV-token-seconds')),
                ('gpu_s', models.FloatField(default=0.0, verbose_name='GPU-seconds')),
                ('cost_usd', models.FloatField(default=0.0, verbose_name='cost (USD)')),
                ('charged_usd', models.FloatField(default=0.0, help_text='By price factor, batch discount or spot price.', verbose_name='charged (USD)')),
                ('api_key', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='accounts.apikey', verbose_name='API key')),
                ('tenant', models.ForeignKey(db_index=False, help_text="Empty: idle, nobody's.", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.tenant')),
            ],
            options={
                'verbose_name': 'hour of usage',
                'verbose_name_plural': 'hours of usage',
                'ordering': ['-hour', '-cost_usd'],
                'indexes': [models.Index(fields=['tenant', 'hour'], name='usage_tenant')],
            },
        ),
    ]
