import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    replaces = [
        ('accounts', '0005_allowed_models'),
    ]

    initial = True

    dependencies = [
        ('accounts', '0001_squashed'),
        ('fleet', '0001_squashed'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='default_slo_class',
            field=models.ForeignKey(help_text='Class of requests that name none.', on_delete=django.db.models.deletion.PROTECT, related_name='+', to='fleet.sloclass', verbose_name='default SLO class'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='slo_classes',
            field=models.ManyToManyField(blank=True, related_name='tenants', to='fleet.sloclass', verbose_name='SLO classes'),
        ),
        migrations.AddField(
            model_name='membership',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to='accounts.tenant'),
        ),
        migrations.AddField(
            model_name='budget',
            name='tenant',
            field=models.ForeignKey(blank=True, help_text='Empty: of all tenants together, for a model.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='budgets', to='accounts.tenant'),
        ),
        migrations.AddField(
            model_name='apikey',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='api_keys', to='accounts.tenant'),
        ),
        migrations.AddConstraint(
            model_name='membership',
            constraint=models.UniqueConstraint(fields=('user', 'tenant'), name='one_membership_per_user_and_tenant'),
        ),
        migrations.AddConstraint(
            model_name='budget',
            constraint=models.UniqueConstraint(fields=('tenant', 'api_key', 'model', 'kind'), name='one_budget_per_scope', nulls_distinct=False),
        ),
    ]
