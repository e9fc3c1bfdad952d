from django.apps import AppConfig
from django.core import checks
from django.db.backends.signals import connection_created


class JobsConfig(AppConfig):
    name = "controlplane.jobs"
    label = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from controlplane.database import renew_read_only
        from controlplane.jobs.broker import check_redis

        checks.register(check_redis, deploy=True)
        connection_created.connect(renew_read_only)
