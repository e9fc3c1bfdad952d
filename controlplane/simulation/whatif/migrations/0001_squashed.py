import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('whatif', '0001_what_ifs'),
        ('whatif', '0002_twin_errors'),
        ('whatif', '0003_address_of_the_form'),
        ('whatif', '0004_decisions_side_by_side'),
        ('whatif', '0005_seeds_of_scenarios'),
    ]

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Future',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('letter', models.CharField(choices=[('A', 'A'), ('B', 'B'), ('C', 'C'), ('D', 'D'), ('E', 'E'), ('F', 'F')], max_length=1)),
                ('name', models.CharField(max_length=80)),
                ('changes', models.JSONField(blank=True, default=list, help_text='As `changes`; none for A.')),
                ('decides', models.JSONField(blank=True, default=list, help_text='Decisions that first differ from those of A.')),
            ],
            options={
                'ordering': ['what_if', 'letter'],
            },
        ),
        migrations.CreateModel(
            name='Counterfactual',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('round', models.UUIDField(db_index=True, default=uuid.uuid4)),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('from_at', models.DateTimeField()),
                ('to_at', models.DateTimeField()),
                ('bundle', models.CharField(blank=True, help_text='Empty: policies as they were.', max_length=40)),
                ('requests', models.PositiveIntegerField()),
                ('cost_usd', models.FloatField()),
                ('missed', models.PositiveIntegerField(help_text='Requests that missed their SLO.')),
                ('ttft_p95_ms', models.FloatField(blank=True, null=True)),
                ('saved_usd', models.FloatField(help_text='Against policies as they were; below 0: it costs more.')),
                ('fewer_missed', models.IntegerField(help_text='Against policies as they were; below 0: it misses more.')),
            ],
            options={
                'ordering': ['-made_at', 'bundle'],
                'constraints': [models.UniqueConstraint(fields=('round', 'bundle'), name='one_bundle_a_round')],
            },
        ),
        migrations.CreateModel(
            name='TraceFile',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=160)),
                ('format', models.CharField(help_text='A name in `scheduling.simulation.workload.traces`.', max_length=20)),
                ('content', models.BinaryField(help_text='Compressed with zlib.')),
                ('requests', models.PositiveIntegerField()),
                ('span_s', models.FloatField(help_text='From its first request to its last.')),
                ('uploaded_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('uploaded_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='TwinError',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('made_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('model', models.CharField(max_length=160)),
                ('gpu', models.CharField(help_text='GPUs of an instance.', max_length=80)),
                ('from_at', models.DateTimeField()),
                ('to_at', models.DateTimeField()),
                ('requests', models.PositiveIntegerField()),
                ('measured', models.JSONField(help_text='ttft_p50, ttft_p95, itl_p50, itl_p95 in milliseconds, and slo_met.')),
                ('simulated', models.JSONField(help_text='The same.')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['model', 'gpu', '-id'], name='twin_error_profile')],
            },
        ),
        migrations.CreateModel(
            name='WhatIf',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('title', models.CharField(max_length=160)),
                ('start', models.JSONField(blank=True, default=dict, help_text='As `start.Start`; empty in a draft not begun yet.')),
                ('horizon_s', models.FloatField(default=3600.0, validators=[django.core.validators.MinValueValidator(60)])),
                ('warmup_s', models.FloatField(default=0.0, help_text='Of the horizon, from its begin: not counted.', validators=[django.core.validators.MinValueValidator(0)])),
                ('seeds', models.PositiveSmallIntegerField(default=5, validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(100)])),
                ('edits', models.JSONField(blank=True, default=list, help_text='Changes of demand that all futures share.')),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('interrupted', 'Interrupted')], db_index=True, default='draft', max_length=11)),
                ('created_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('submitted_at', models.DateTimeField(blank=True, null=True)),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('ended_by', models.CharField(blank=True, help_text='Who cancelled it.', max_length=120)),
                ('usd_per_1000_missed', models.FloatField(default=5.0, help_text='Price of a thousand requests that miss their SLO.', validators=[django.core.validators.MinValueValidator(0)])),
                ('slo_target', models.FloatField(default=0.99, help_text='Share that must meet it.', validators=[django.core.validators.MinValueValidator(0), django.core.validators.MaxValueValidator(1)])),
                ('twin_error', models.JSONField(blank=True, default=dict, help_text='Of the simulation against what was measured, when it was made.')),
                ('asked', models.TextField(blank=True, help_text='Address of the form that asked it; empty: it was asked otherwise.')),
                ('plan', models.JSONField(blank=True, default=dict, help_text='What was made of the chosen future; empty: nothing.')),
                ('chosen', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='chosen_in', to='whatif.future')),
                ('requested_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name': 'what-if',
                'ordering': ['-id'],
            },
        ),
        migrations.AddField(
            model_name='future',
            name='what_if',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='futures', to='whatif.whatif'),
        ),
        migrations.CreateModel(
            name='FutureSeed',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('seed', models.PositiveBigIntegerField()),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('cancelled', 'Cancelled'), ('failed', 'Failed'), ('interrupted', 'Interrupted')], db_index=True, default='queued', max_length=11)),
                ('phase', models.CharField(choices=[('waiting', 'Waiting'), ('staging', 'Staging'), ('simulating', 'Simulating'), ('measuring', 'Measuring')], default='waiting', max_length=10)),
                ('progress', models.FloatField(default=0.0, help_text='Share of the whole run that is done.')),
                ('lease', models.UUIDField(blank=True, default=None, help_text='Of the process that runs it.', null=True)),
                ('heartbeat_at', models.DateTimeField(blank=True, null=True)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('result', models.JSONField(blank=True, default=dict, help_text='Columns of the comparison, by scope.')),
                ('curves', models.BinaryField(blank=True, help_text='TTFT and what changed over time: JSON, compressed.', null=True)),
                ('log', models.BinaryField(blank=True, help_text='Who served each request, compressed; kept of the first seed until compared.', null=True)),
                ('pairs', models.BinaryField(blank=True, help_text='Of the first seed: decisions of it and of A around those that first differ, compressed.', null=True)),
                ('error', models.TextField(blank=True)),
                ('future', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='whatif.future')),
            ],
            options={
                'verbose_name': 'run of a future',
                'verbose_name_plural': 'runs of futures',
                'ordering': ['future', 'seed'],
                'constraints': [models.UniqueConstraint(fields=('future', 'seed'), name='one_run_a_seed')],
            },
        ),
        migrations.AddConstraint(
            model_name='future',
            constraint=models.UniqueConstraint(fields=('what_if', 'letter'), name='one_future_a_letter'),
        ),
    ]
