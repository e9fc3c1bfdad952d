"""The Celery application: one broker (Redis), two queues.

`control` carries short work (fleet operations, housekeeping, later forecasts and plans); `simulation` carries long,
processor-bound work. A node agent is a Celery worker that also listens on its node's own queue, `node.<name>`.
"""

import logging
import os
import pkgutil

from billiard.exceptions import WorkerLostError
from celery import Celery

from workers import tasks

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")


def without_traceback_of_a_lost_process(record: logging.LogRecord) -> bool:
    """A process of the pool that was killed has no traceback to show: Celery's is of its own supervision."""
    if WorkerLostError.__name__ in record.getMessage():  # what was raised is wrapped, with the traceback as a text
        record.exc_info = record.exc_text = None
    return True


def is_news(record: logging.LogRecord) -> bool:
    """Celery announces a default of its next version at every loss of the broker; ours is set in the settings."""
    return "In Celery 5.1 we introduced" not in record.getMessage()


logging.getLogger("celery.worker.request").addFilter(without_traceback_of_a_lost_process)
logging.getLogger("py.warnings").addFilter(is_news)  # not a filter of warnings: Celery puts its own in front of those

app = Celery("pilothouse", task_cls="controlplane.jobs.task:RecordedTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
for module in pkgutil.iter_modules(tasks.__path__):
    app.autodiscover_tasks(["workers.tasks"], related_name=module.name)
