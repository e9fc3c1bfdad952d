import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('lengths', '0001_initial'),
        ('lengths', '0002_sample_conversations'),
        ('lengths', '0003_lexical_cache'),
        ('lengths', '0004_late_shadows_and_embedding_cache'),
        ('lengths', '0005_trainings'),
    ]

    initial = True

    dependencies = [
        ('accounts', '0001_squashed'),
    ]

    operations = [
        migrations.CreateModel(
            name='LengthMinute',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('minute', models.DateTimeField(db_index=True)),
                ('model', models.CharField(max_length=160)),
                ('tenant', models.CharField(max_length=63)),
                ('predictor', models.CharField(help_text='cache, lexical cache, embedding cache, prior, a version, or its shadow.', max_length=40)),
                ('bucket_tokens', models.PositiveIntegerField(help_text='Real lengths from this on, up to twice as many.')),
                ('requests', models.PositiveIntegerField(default=0)),
                ('predicted_tokens', models.PositiveBigIntegerField(default=0)),
                ('output_tokens', models.PositiveBigIntegerField(default=0)),
                ('absolute_error_tokens', models.PositiveBigIntegerField(default=0)),
                ('within_25', models.PositiveIntegerField(default=0)),
                ('within_50', models.PositiveIntegerField(default=0)),
                ('within_100', models.PositiveIntegerField(default=0)),
                ('below_median', models.PositiveIntegerField(default=0, help_text='Real length at most the predicted median.')),
                ('below_upper', models.PositiveIntegerField(default=0, help_text='Real length at most the predicted 0.9 quantile.')),
                ('late', models.PositiveIntegerField(default=0, help_text='Answers of a shadow that would have come after the time that a request waits.')),
            ],
            options={
                'ordering': ['-minute'],
                'constraints': [models.UniqueConstraint(fields=('minute', 'model', 'tenant', 'predictor', 'bucket_tokens'), name='one_length_row_per_minute_and_series')],
            },
        ),
        migrations.CreateModel(
            name='LengthVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField(unique=True)),
                ('kind', models.CharField(help_text='A name in `forecasting.lengths`, such as student.', max_length=40)),
                ('state', models.CharField(choices=[('shadow', 'Shadow'), ('active', 'Active'), ('retired', 'Retired'), ('rejected', 'Rejected')], db_index=True, default='shadow', max_length=8)),
                ('file', models.CharField(blank=True, help_text='Below the state folder; empty: the bundled one.', max_length=255)),
                ('trained_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('shadow_since', models.DateTimeField(blank=True, help_text='When it was put into the shadow again.', null=True)),
                ('samples', models.PositiveIntegerField(default=0, help_text='That it was trained on.')),
                ('measures', models.JSONField(blank=True, default=dict, help_text='On held-out samples: mae, acc_25, acc_50, acc_100, rank_correlation.')),
                ('note', models.CharField(blank=True, max_length=255)),
                ('changed_at', models.DateTimeField(auto_now=True)),
            ],
            options={
                'ordering': ['-number'],
                'constraints': [models.UniqueConstraint(condition=models.Q(('state', 'active')), fields=('state',), name='one_active_length_version')],
            },
        ),
        migrations.CreateModel(
            name='LengthTraining',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(help_text='A name in `forecasting.lengths`, such as student.', max_length=40)),
                ('asked_at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('asked_by', models.CharField(blank=True, help_text='Empty: the schedule.', max_length=150)),
                ('reason', models.CharField(blank=True, max_length=255)),
                ('state', models.CharField(choices=[('queued', 'Waits'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed')], db_index=True, default='queued', max_length=8)),
                ('step', models.CharField(blank=True, help_text='What it does now, in words.', max_length=80)),
                ('done', models.PositiveIntegerField(default=0, help_text='Of `steps`, in this step.')),
                ('steps', models.PositiveIntegerField(default=0)),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('seen_at', models.DateTimeField(blank=True, help_text='When it last reported progress.', null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('error', models.TextField(blank=True, help_text='Why there is no version.')),
                ('version', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='lengths.lengthversion')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='LengthSample',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ('model', models.CharField(max_length=160)),
                ('slo_class', models.CharField(max_length=40)),
                ('prompt_tokens', models.PositiveIntegerField()),
                ('max_tokens', models.PositiveIntegerField(null=True)),
                ('turns', models.PositiveSmallIntegerField(default=1)),
                ('conversation', models.JSONField(help_text='Sizes of the messages before the last one; none where there are none, or it is not known.', null=True)),
                ('tools', models.PositiveSmallIntegerField(default=0)),
                ('features', models.BinaryField(blank=True, help_text='Of the prompt, by `forecasting.lengths`; no text can be read off.')),
                ('text', models.TextField(blank=True)),
                ('predicted_tokens', models.PositiveIntegerField()),
                ('predicted_by', models.CharField(help_text='cache, lexical cache, embedding cache, prior, or a version.', max_length=40)),
                ('output_tokens', models.PositiveIntegerField()),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.tenant')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['model', '-at'], name='length_sample_model')],
            },
        ),
    ]
