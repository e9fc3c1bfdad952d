"""The Celery application: one broker (Redis), two queues.

`control` carries short work (fleet operations, housekeeping, later forecasts and plans); `simulation` carries long,
processor-bound work. A node agent is a Celery worker that also listens on its node's own queue, `node.<name>`.
"""

import os
import pkgutil

from celery import Celery

from workers import tasks

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

app = Celery("pilothouse")
app.config_from_object("django.conf:settings", namespace="CELERY")
for module in pkgutil.iter_modules(tasks.__path__):
    app.autodiscover_tasks(["workers.tasks"], related_name=module.name)
