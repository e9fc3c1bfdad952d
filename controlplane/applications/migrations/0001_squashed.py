import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('applications', '0001_initial'),
        ('applications', '0002_runs_reported'),
        ('applications', '0003_graph_versions'),
        ('applications', '0004_prewarming'),
        ('applications', '0005_costs_and_predictions'),
    ]

    initial = True

    dependencies = [
        ('accounts', '0001_squashed'),
    ]

    operations = [
        migrations.CreateModel(
            name='FollowedLedger',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('ledger_pk', models.PositiveBigIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name='UnitBackend',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(help_text='As units name it in `backend`, such as python:3.11.', max_length=80, unique=True, validators=[django.core.validators.RegexValidator('^[A-Za-z0-9._:/-]+$', 'Letters, digits or . _ : / -')])),
                ('kind', models.CharField(choices=[('container', 'Container'), ('dnn', 'DNN model')], default='container', max_length=16)),
                ('image', models.CharField(blank=True, default='', help_text='Container image on the host; used where Docker is there.', max_length=255)),
                ('command', models.CharField(blank=True, default='', help_text='Of the container, or of a process where there is no Docker: it listens on {port}, on the loopback.', max_length=1000)),
                ('container_port', models.PositiveIntegerField(default=0, help_text='Port of the container that is published; 0: none.', validators=[django.core.validators.MaxValueValidator(65535)])),
                ('capacity', models.PositiveSmallIntegerField(default=2, help_text='Most of them at once, warm or in use.', validators=[django.core.validators.MinValueValidator(1), django.core.validators.MaxValueValidator(64)])),
                ('keep_alive_s', models.FloatField(default=300.0, help_text='One that is not used for so long is stopped.', validators=[django.core.validators.MinValueValidator(1.0), django.core.validators.MaxValueValidator(86400.0)])),
                ('start_limit_s', models.FloatField(default=60.0, help_text='Longest start.', validators=[django.core.validators.MinValueValidator(1.0), django.core.validators.MaxValueValidator(600.0)])),
                ('reused', models.BooleanField(default=False, help_text='A container serves the next execution, of any tenant; a DNN model always does.')),
                ('active', models.BooleanField(default=True)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Application',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80)),
                ('title', models.CharField(blank=True, default='', help_text='Name given to one that was recognized.', max_length=80)),
                ('units', models.JSONField(default=dict, help_text='Backend of each unit, by name.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('learns_from', models.DateTimeField(blank=True, help_text='Runs that ended before are not in its demand graph: a version was restored then.', null=True)),
                ('frozen_at', models.DateTimeField(blank=True, help_text='Runs that ended later are recorded and not learned; empty while it learns.', null=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='applications', to='accounts.tenant')),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='ApplicationRun',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('run', models.CharField(max_length=80)),
                ('began_at', models.DateTimeField(db_index=True)),
                ('last_call_at', models.DateTimeField(help_text='End of its last call so far.')),
                ('ended_at', models.DateTimeField(blank=True, help_text='Empty while it runs.', null=True)),
                ('calls', models.PositiveIntegerField(default=0)),
                ('failed_calls', models.PositiveIntegerField(default=0)),
                ('prompt_tokens', models.PositiveBigIntegerField(default=0)),
                ('output_tokens', models.PositiveBigIntegerField(default=0)),
                ('imported', models.BooleanField(default=False, help_text='It came with a graph that was imported.')),
                ('steps', models.JSONField(blank=True, default=list, help_text='Its record: units, what led to them, demands.')),
                ('region', models.CharField(blank=True, default='', help_text='Of the caller of its first call.', max_length=40)),
                ('service_s', models.FloatField(blank=True, help_text='Service of all calls and units, by the profiles of their models.', null=True)),
                ('expected_calls', models.PositiveIntegerField(default=0, help_text='Calls that were placed by rank: what the run still needed was predicted then.')),
                ('needed_s', models.FloatField(default=0.0, help_text='Service that came after these predictions, their sum.')),
                ('error_s', models.FloatField(default=0.0, help_text='By how much the predictions were wrong, their sum.')),
                ('plain_error_s', models.FloatField(default=0.0, help_text='The same of the simplest rule: the mean of earlier runs less what this one had had.')),
                ('deadline_s', models.FloatField(blank=True, help_text='After it began; empty for none.', null=True)),
                ('opened', models.BooleanField(default=False, help_text='It was opened by its tenant, who is to close it.')),
                ('closed_at', models.DateTimeField(blank=True, help_text='When its tenant closed it.', null=True)),
                ('outcome', models.CharField(blank=True, choices=[('ended', 'Ended'), ('done', 'Done'), ('failed', 'Failed'), ('cancelled', 'Cancelled'), ('abandoned', 'Abandoned'), ('stopped', 'Stopped')], default='', max_length=16)),
                ('application', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='applications.application')),
            ],
            options={
                'ordering': ['-began_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='GraphVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('made_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('made_by', models.CharField(max_length=150)),
                ('why', models.CharField(max_length=255)),
                ('records', models.PositiveIntegerField(help_text='Runs that it is learned from.')),
                ('error_s', models.FloatField(blank=True, help_text='Mean error of predictions of what its left-out runs still needed (s).', null=True)),
                ('needed_s', models.FloatField(blank=True, help_text='Mean of what these runs needed (s).', null=True)),
                ('size_bytes', models.PositiveIntegerField(help_text='Of its JSON form.')),
                ('graph', models.BinaryField(help_text='Its JSON form, compressed by zlib.')),
                ('application', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='versions', to='applications.application')),
            ],
            options={
                'ordering': ['-number'],
            },
        ),
        migrations.CreateModel(
            name='PrewarmRow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('application', models.CharField(blank=True, default='', help_text='Empty: of a request without marks.', max_length=80)),
                ('run', models.CharField(blank=True, default='', max_length=80)),
                ('kind', models.CharField(help_text='adapter, prefix, model, container or dnn.', max_length=16)),
                ('backend', models.CharField(max_length=160)),
                ('place', models.CharField(blank=True, default='', help_text='Instance, or address.', max_length=160)),
                ('why', models.CharField(blank=True, default='', max_length=400)),
                ('began_at', models.DateTimeField(db_index=True)),
                ('warm_at', models.DateTimeField(blank=True, null=True)),
                ('settled_at', models.DateTimeField(blank=True, help_text='When it was used, or given up.', null=True)),
                ('fate', models.CharField(blank=True, default='', help_text='hit, late, miss, waste or failed; empty: not used yet.', max_length=8)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.tenant')),
            ],
            options={
                'ordering': ['-began_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='RunCost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('hour', models.DateTimeField(db_index=True)),
                ('application', models.CharField(max_length=80)),
                ('run', models.CharField(max_length=80)),
                ('cost_usd', models.FloatField(default=0.0, verbose_name='cost (USD)')),
                ('charged_usd', models.FloatField(default=0.0, verbose_name='charged (USD)')),
                ('tenant', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.tenant')),
            ],
            options={
                'ordering': ['-hour'],
            },
        ),
        migrations.CreateModel(
            name='UnitReport',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('report', models.CharField(help_text="Its tenant's name for it.", max_length=80)),
                ('unit', models.CharField(max_length=80)),
                ('kind', models.CharField(max_length=16)),
                ('backend', models.CharField(max_length=80)),
                ('began_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(blank=True, help_text='Empty while it runs.', null=True)),
                ('failed', models.BooleanField(default=False)),
                ('warm', models.BooleanField(help_text='Whether it was handed a warm backend; empty where none is kept.', null=True)),
                ('address', models.CharField(blank=True, default='', help_text='Of the backend that it was handed.', max_length=80)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='reports', to='applications.applicationrun')),
            ],
            options={
                'ordering': ['began_at', 'id'],
            },
        ),
        migrations.AddConstraint(
            model_name='application',
            constraint=models.UniqueConstraint(fields=('tenant', 'name'), name='one_application_of_a_name'),
        ),
        migrations.AddIndex(
            model_name='applicationrun',
            index=models.Index(condition=models.Q(('ended_at', None)), fields=['last_call_at'], name='runs_that_run'),
        ),
        migrations.AddConstraint(
            model_name='applicationrun',
            constraint=models.UniqueConstraint(fields=('application', 'run'), name='one_run_of_a_name'),
        ),
        migrations.AddConstraint(
            model_name='graphversion',
            constraint=models.UniqueConstraint(fields=('application', 'number'), name='one_version_of_a_number'),
        ),
        migrations.AddIndex(
            model_name='prewarmrow',
            index=models.Index(fields=['tenant', 'application', 'run'], name='prewarm_of_run'),
        ),
        migrations.AddIndex(
            model_name='runcost',
            index=models.Index(fields=['tenant', 'application', 'run'], name='cost_of_run'),
        ),
        migrations.AddConstraint(
            model_name='unitreport',
            constraint=models.UniqueConstraint(fields=('run', 'report'), name='one_report_of_a_name'),
        ),
    ]
