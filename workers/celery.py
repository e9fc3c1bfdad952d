"""The Celery application: one broker (Redis), two queues.

`control` carries short work (fleet operations, housekeeping, later forecasts and plans); `simulation` carries long,
processor-bound work. A node agent is a Celery worker that also listens on its node's own queue, `node.<name>`.
"""

import functools
import gc
import logging
import os
import pkgutil
import sys
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import Celery, signals

from workers import tasks

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
# Django's checks read every page, address and admin class, which neither worker nor beat needs; `manage.py check` runs them.
os.environ.setdefault("CELERY_SKIP_CHECKS", "true")


SIMULATION = "simulation"
"""The queue of long work."""


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


def packages() -> list[str]:
    """Where tasks are. Beat sends them by name."""
    return [] if "beat" in sys.argv[1:] else [tasks.__name__]


@functools.cache
def load_simulations() -> None:
    """Once; a worker goes on without what cannot be loaded."""
    from controlplane.simulation.running import warm_up

    try:
        warm_up()
    except Exception:
        logging.getLogger(__name__).exception("simulations are loaded by the first that is asked for")


@signals.worker_before_create_process.connect
def share_memory(**_: Any) -> None:
    """Load what simulations need, for all processes of the pool at once, and take what is imported out of the garbage
    collector's sight, which would write to its pages and so copy them into each process."""
    if SIMULATION in " ".join(sys.argv):
        load_simulations()
    gc.collect()
    gc.freeze()


app = Celery("pilothouse", task_cls="controlplane.jobs.task:RecordedTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
for module in pkgutil.iter_modules(tasks.__path__):
    app.autodiscover_tasks(packages, related_name=module.name)
