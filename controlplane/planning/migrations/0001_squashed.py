import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('planning', '0001_first'),
        ('planning', '0002_policy_memory'),
        ('planning', '0003_forecast_by_class'),
        ('planning', '0004_plan_states'),
        ('planning', '0005_forecast_of_interactive'),
        ('planning', '0006_siloed_is_reactive'),
    ]

    initial = True

    dependencies = [
        ('fleet', '0001_squashed'),
    ]

    operations = [
        migrations.CreateModel(
            name='Backtest',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('source', models.CharField(help_text='The ledger, or the name of a trace.', max_length=160)),
                ('window_s', models.PositiveIntegerField(validators=[django.core.validators.MinValueValidator(1)])),
                ('horizon_windows', models.PositiveIntegerField(default=1)),
                ('rows', models.JSONField(default=list, help_text='One a forecaster, series and quantity: mean_ape, max_ape, pinball, coverage_80, coverage_95, fit_s, and mean_ape_by_horizon.')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='StrategyComparison',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('from_at', models.DateTimeField()),
                ('to_at', models.DateTimeField()),
                ('requests', models.PositiveIntegerField(default=0)),
                ('rows', models.JSONField(default=list, help_text='One a strategy: strategy, instance_hours, usd, p95_ttft_ms, p95_e2e_ms, slo_met, waste_hours, moves.')),
                ('note', models.CharField(blank=True, max_length=255)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Forecast',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('model', models.CharField(max_length=160)),
                ('region', models.CharField(max_length=40)),
                ('slo_class', models.CharField(blank=True, help_text='Empty: all interactive classes together.', max_length=40)),
                ('quantity', models.CharField(choices=[('prompt', 'Prompt tokens'), ('output', 'Output tokens')], max_length=8)),
                ('forecaster', models.CharField(max_length=40)),
                ('window_s', models.PositiveIntegerField(validators=[django.core.validators.MinValueValidator(1)])),
                ('start_at', models.DateTimeField(help_text='Begin of the first window.')),
                ('mean', models.JSONField(default=list)),
                ('lower_80', models.JSONField(default=list)),
                ('upper_80', models.JSONField(default=list)),
                ('lower_95', models.JSONField(default=list)),
                ('upper_95', models.JSONField(default=list)),
                ('note', models.CharField(blank=True, help_text='Why a simpler forecaster stood in, if one did.', max_length=255)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['model', 'region', 'quantity', 'slo_class', '-made_at'], name='forecast_series')],
            },
        ),
        migrations.CreateModel(
            name='ScalingPlan',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('round', models.UUIDField(db_index=True, default=uuid.uuid4)),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('valid_until', models.DateTimeField()),
                ('strategy', models.CharField(max_length=40)),
                ('status', models.CharField(choices=[('advice', 'Advice'), ('shadow', 'Shadow'), ('approved', 'Approved'), ('in_progress', 'In progress'), ('in_force', 'In force'), ('carried_out', 'Carried out'), ('rejected', 'Rejected'), ('superseded', 'Superseded'), ('expired', 'Expired')], db_index=True, default='advice', max_length=12)),
                ('inputs', models.JSONField(default=dict, help_text='Demand, capability, prices, bounds and present instances.')),
                ('targets', models.JSONField(default=list, help_text='By region and GPU type: region, gpu_type, present, target, demand_tokens_per_s, reason; once approved, left (instances still to be added, or below 0 taken away) and obstacle.')),
                ('binding', models.JSONField(default=list, help_text='The rows that bind, in words.')),
                ('cost_usd_per_hour_before', models.FloatField(default=0.0)),
                ('cost_usd_per_hour_after', models.FloatField(default=0.0)),
                ('solver', models.CharField(blank=True, max_length=40)),
                ('gap', models.FloatField(blank=True, help_text="Relative gap to the solver's bound.", null=True)),
                ('solve_ms', models.FloatField(blank=True, null=True)),
                ('note', models.CharField(blank=True, help_text='Such as: demand that no capacity could meet.', max_length=255)),
                ('decided_by', models.CharField(blank=True, max_length=120)),
                ('decided_at', models.DateTimeField(blank=True, null=True)),
                ('carried_out_at', models.DateTimeField(blank=True, help_text='When its targets were reached; empty while they are not.', null=True)),
                ('model', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='scaling_plans', to='fleet.model')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='ScalingMove',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('source', models.CharField(choices=[('floor', 'Reactive floor'), ('plan', 'Plan'), ('strategy', 'Strategy between plans'), ('operator', 'Operator')], max_length=10)),
                ('strategy', models.CharField(max_length=40)),
                ('model', models.CharField(max_length=160)),
                ('region', models.CharField(max_length=40)),
                ('gpu_type', models.CharField(max_length=40)),
                ('instance', models.CharField(blank=True, max_length=80)),
                ('delta', models.SmallIntegerField(help_text='1: one more; -1: one less.')),
                ('reason', models.CharField(max_length=255)),
                ('inputs', models.JSONField(default=dict)),
                ('plan', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='moves', to='planning.scalingplan')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='ScalingPolicy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('strategy', models.CharField(default='reactive', help_text='A name in `scheduling.scaling`.', max_length=40)),
                ('mode', models.CharField(choices=[('off', 'Off: only the reactive floor'), ('shadow', 'Shadow: plans are made and compared, never carried out'), ('ask', 'Ask: an operator approves each plan'), ('auto', 'Auto: the strategy follows plans by itself')], default='shadow', max_length=8)),
                ('parameters', models.JSONField(blank=True, default=dict)),
                ('memory', models.JSONField(blank=True, default=dict, editable=False, help_text='What the strategy remembers from tick to tick: numbers.')),
                ('changed_at', models.DateTimeField(auto_now=True)),
                ('model', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='scaling_policy', to='fleet.model')),
            ],
            options={
                'verbose_name_plural': 'scaling policies',
                'ordering': ['model__name'],
            },
        ),
        migrations.AddIndex(
            model_name='scalingplan',
            index=models.Index(fields=['model', 'status', '-made_at'], name='plan_by_model'),
        ),
        migrations.AddIndex(
            model_name='scalingmove',
            index=models.Index(fields=['model', 'region', '-at'], name='move_by_endpoint'),
        ),
    ]
