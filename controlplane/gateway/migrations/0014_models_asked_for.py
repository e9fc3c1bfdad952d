from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('gateway', '0013_deadline_of_runs'),
    ]

    operations = [
        migrations.AddField(
            model_name='ledgerrow',
            name='adapter',
            field=models.CharField(blank=True, default='', help_text='LoRA adapter of the model that served it; empty: none.', max_length=160),
        ),
        migrations.AddField(
            model_name='ledgerrow',
            name='asked_model',
            field=models.CharField(blank=True, default='', help_text='Name that it asked for, where another model served it; empty: that of the model or adapter.', max_length=160),
        ),
        migrations.AddField(
            model_name='ledgerrow',
            name='model_rule',
            field=models.CharField(blank=True, default='', help_text='Why another model served it: weights, unavailable, wait or failure.', max_length=16),
        ),
        migrations.AddIndex(
            model_name='ledgerrow',
            index=models.Index(condition=models.Q(('asked_model', ''), _negated=True), fields=['asked_model', '-arrived_at'], name='ledger_asked_model'),
        ),
    ]
