from django.apps import AppConfig
from django.core import checks


class JobsConfig(AppConfig):
    name = "controlplane.jobs"
    label = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from controlplane.jobs.broker import check_redis

        checks.register(check_redis, deploy=True)
