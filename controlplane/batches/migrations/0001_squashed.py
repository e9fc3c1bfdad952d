import controlplane.batches.models
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('batches', '0001_initial'),
        ('batches', '0002_samples'),
        ('batches', '0003_speed_up'),
    ]

    initial = True

    dependencies = [
        ('accounts', '0001_squashed'),
    ]

    operations = [
        migrations.CreateModel(
            name='StoredFile',
            fields=[
                ('id', models.CharField(default=controlplane.batches.models.new_file_id, editable=False, max_length=40, primary_key=True, serialize=False)),
                ('content', models.FileField(max_length=200, storage=controlplane.batches.models.file_storage, upload_to='')),
                ('filename', models.CharField(max_length=255)),
                ('purpose', models.CharField(choices=[('batch', 'Batch input'), ('batch_output', 'Batch output')], max_length=16)),
                ('size_bytes', models.BigIntegerField()),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('expires_at', models.DateTimeField(blank=True, null=True)),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='files', to='accounts.tenant')),
            ],
            options={
                'verbose_name': 'file',
                'ordering': ['-created_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Batch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', models.CharField(default=controlplane.batches.models.new_batch_id, editable=False, max_length=40, unique=True, verbose_name='batch')),
                ('endpoint', models.CharField(max_length=40)),
                ('completion_window', models.CharField(max_length=8)),
                ('status', models.CharField(choices=[('validating', 'Validating'), ('failed', 'Failed'), ('in_progress', 'Running'), ('finalizing', 'Finalizing'), ('completed', 'Completed'), ('expired', 'Expired'), ('cancelling', 'Canceling'), ('cancelled', 'Canceled')], default='validating', max_length=12)),
                ('ends_as', models.CharField(blank=True, choices=[('validating', 'Validating'), ('failed', 'Failed'), ('in_progress', 'Running'), ('finalizing', 'Finalizing'), ('completed', 'Completed'), ('expired', 'Expired'), ('cancelling', 'Canceling'), ('cancelled', 'Canceled')], max_length=12)),
                ('model', models.CharField(blank=True, max_length=200)),
                ('lines_read', models.PositiveIntegerField(default=0)),
                ('total', models.PositiveIntegerField(default=0)),
                ('completed', models.PositiveIntegerField(default=0)),
                ('failed', models.PositiveIntegerField(default=0)),
                ('input_tokens', models.PositiveBigIntegerField(default=0)),
                ('output_tokens', models.PositiveBigIntegerField(default=0)),
                ('errors', models.JSONField(default=list)),
                ('metadata', models.JSONField(null=True)),
                ('output_expires_after_s', models.PositiveIntegerField(null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('expires_at', models.DateTimeField()),
                ('urgent_by', models.DateTimeField(blank=True, null=True)),
                ('moments', models.JSONField(default=dict)),
                ('samples', models.JSONField(default=list)),
                ('api_key', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='accounts.apikey')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='batches', to='accounts.tenant')),
                ('error_file', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='batches.storedfile')),
                ('input_file', models.ForeignKey(db_constraint=False, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='batches.storedfile')),
                ('output_file', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='batches.storedfile')),
            ],
            options={
                'verbose_name_plural': 'batches',
                'ordering': ['-created_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='BatchLine',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('custom_id', models.CharField(max_length=512)),
                ('model', models.CharField(max_length=200)),
                ('offset', models.BigIntegerField()),
                ('size_bytes', models.PositiveIntegerField()),
                ('answer', models.TextField(null=True)),
                ('succeeded', models.BooleanField(default=False)),
                ('batch', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='lines', to='batches.batch')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('answer__isnull', True)), fields=['batch', 'number'], name='lines_without_answer')],
                'constraints': [models.UniqueConstraint(fields=('batch', 'number'), name='one_line_per_number')],
            },
        ),
        migrations.AddIndex(
            model_name='storedfile',
            index=models.Index(fields=['tenant', '-created_at'], name='files_of_tenant'),
        ),
        migrations.AddIndex(
            model_name='batch',
            index=models.Index(fields=['tenant', '-created_at'], name='batches_of_tenant'),
        ),
        migrations.AddIndex(
            model_name='batch',
            index=models.Index(fields=['status', 'expires_at'], name='batches_by_status'),
        ),
    ]
