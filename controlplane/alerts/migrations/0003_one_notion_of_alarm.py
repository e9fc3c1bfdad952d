from typing import Any

import django.core.validators
from django.db import migrations, models

import controlplane.alerts.models

RULES: dict[str, dict[str, Any]] = {
    "SLO missed": {"condition": "slo_burn"},
    "Requests fail": {"condition": "errors", "for_s": 30},
    "Endpoint short or queue full": {"condition": "endpoint", "for_s": 30},
    "Instance, GPU or region down": {"condition": "instance", "for_s": 10},
    "Rollout failed": {"condition": "rollout"},
    "Plan awaits approval": {"condition": "plan", "severity": "info"},
    "Scaling flaps": {"condition": "flapping"},
    "Batch late or at risk": {"condition": "batch"},
    "Budget nearly used": {"condition": "budget"},
    "Job or part in trouble": {"condition": "job", "for_s": 10},
}
"""What is watched from the start; admins change, silence and delete these like their own."""


def add_rules(apps: Any, schema_editor: Any) -> None:
    rules = apps.get_model("alerts", "AlertRule").objects
    rules.filter(condition="slo_burn", threshold=None).update(threshold=14.4)
    watched = set(rules.filter(model="", active=True).exclude(condition="slo_burn").values_list("condition", flat=True))
    for name, values in RULES.items():
        if values["condition"] not in watched and not rules.filter(name=name).exists():
            rules.create(name=name, **{"severity": ""} | values)


class Migration(migrations.Migration):
    dependencies = [("alerts", "0002_gpus")]

    operations = [
        migrations.RenameField("alertrule", "webhook_url", "receivers"),
        migrations.AddField(
            model_name='alert',
            name='causes',
            field=models.JSONField(default=list, help_text='Of missed SLOs: words, share and page of each.'),
        ),
        migrations.AddField(
            model_name='alert',
            name='rank',
            field=models.FloatField(default=0.0, help_text='Among alerts of one severity, lowest first.'),
        ),
        migrations.AddField(
            model_name='alert',
            name='severity',
            field=models.CharField(choices=[('info', 'Info'), ('warning', 'Warning'), ('critical', 'Critical')], default='warning', max_length=16),
        ),
        migrations.AddField(
            model_name='alert',
            name='title',
            field=models.CharField(blank=True, max_length=200),
        ),
        migrations.AlterField(
            model_name='alert',
            name='notified',
            field=models.CharField(blank=True, help_text='The last message that the receivers took.', max_length=8),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='condition',
            field=models.CharField(choices=[('slo_burn', 'SLO missed'), ('errors', 'Requests fail'), ('endpoint', 'Endpoint short of instances, or queue full'), ('instance', 'Instance, GPU or region down'), ('rollout', 'Rollout failed'), ('plan', 'Plan awaits approval'), ('flapping', 'Scaling flaps'), ('batch', 'Batch late or at risk'), ('budget', 'Budget used'), ('job', 'Job or part of the stack in trouble')], max_length=16),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='receivers',
            field=models.CharField(blank=True, help_text='Notified when alerts open and resolve: https:// addresses of webhooks and mail addresses, with spaces between. Of a webhook, which is a secret, only the host is shown.', max_length=500, validators=[controlplane.alerts.models.check_receivers]),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='severity',
            field=models.CharField(blank=True, choices=[('info', 'Info'), ('warning', 'Warning'), ('critical', 'Critical')], help_text='Empty: by how bad it is, warning or critical.', max_length=16),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='slo_class',
            field=models.CharField(blank=True, help_text='Of an SLO; empty: every class.', max_length=40, verbose_name='SLO class'),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='threshold',
            field=models.FloatField(blank=True, help_text='Of an SLO, times the allowed misses (1 if empty); of a budget, the used share (0.9 if empty).', null=True, validators=[django.core.validators.MinValueValidator(0.001)]),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='window_s',
            field=models.PositiveIntegerField(default=3600, help_text='Of an SLO: the long window. The misses must also be above the threshold over a twelfth of it.', validators=[django.core.validators.MinValueValidator(720), django.core.validators.MaxValueValidator(2592000)], verbose_name='window (s)'),
        ),
        migrations.RunPython(add_rules, migrations.RunPython.noop),
    ]
