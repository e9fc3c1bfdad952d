from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_tenant_time_zone'),
        ('fleet', '0001_squashed'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='regions',
            field=models.ManyToManyField(blank=True, help_text='Data residency: the only regions in which its requests are served, held and warmed; none: any.', related_name='tenants', to='fleet.region'),
        ),
    ]
