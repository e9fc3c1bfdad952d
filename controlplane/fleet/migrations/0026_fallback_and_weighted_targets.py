import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0025_transcription'),
    ]

    operations = [
        migrations.AddField(
            model_name='model',
            name='fallback',
            field=models.ForeignKey(blank=True, help_text='Serves a request while no instance of this model does, or when its instances failed it before its first token; empty: none.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='fleet.model', verbose_name='fallback model'),
        ),
        migrations.AddField(
            model_name='model',
            name='fallback_wait_s',
            field=models.FloatField(blank=True, help_text='The fallback also serves a request that would wait longer, in seconds; empty: however long it waits.', null=True, validators=[django.core.validators.MinValueValidator(0.0)], verbose_name='fallback after (s)'),
        ),
        migrations.CreateModel(
            name='WeightedTarget',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(help_text='The public name in requests; all its rows share them.', max_length=160, validators=[django.core.validators.RegexValidator('\\A[A-Za-z0-9][A-Za-z0-9._:/-]*\\Z', 'A model name begins with a letter or digit and holds letters, digits and . _ : / - alone.')])),
                ('target', models.CharField(help_text='The model or adapter that serves this share.', max_length=160)),
                ('weight', models.FloatField(default=1.0, help_text='Its share is its weight over those of all rows.', validators=[django.core.validators.MinValueValidator(0.0)])),
                ('active', models.BooleanField(default=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['name', '-weight', 'target'],
                'constraints': [models.UniqueConstraint(fields=('name', 'target'), name='one_weight_per_name_and_target')],
            },
        ),
    ]
