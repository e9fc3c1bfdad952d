"""The Celery application: one broker (Redis), two queues.

`control` carries short work (fleet operations, housekeeping); `simulation` carries long, processor-bound work (forecasts,
plans, what-ifs, training). A node agent is a Celery worker that also listens on its node's queue, `node.<name>`; `ray` is
for workers that are connected to a Ray cluster.
"""

import ctypes
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


def without_traceback_of_a_lost_process(record: logging.LogRecord) -> bool:
    """Drop the traceback from records about a killed pool process: it is the supervising process's, not the task's."""
    if WorkerLostError.__name__ in record.getMessage():  # what was raised is wrapped, with the traceback as a text
        record.exc_info = record.exc_text = None
    return True


def is_news(record: logging.LogRecord) -> bool:
    """Return False for Celery's warning about the default of its next version, repeated at every loss of the broker."""
    return "In Celery 5.1 we introduced" not in record.getMessage()


COMPUTED_FROM = {"control", "simulation"}
"""Queues whose tasks compute; a node agent listens on its node's queue alone."""
logging.getLogger("celery.worker.request").addFilter(without_traceback_of_a_lost_process)
logging.getLogger("py.warnings").addFilter(is_news)  # not a filter of warnings: Celery puts its own in front of those


def packages() -> list[str]:
    """Return the packages to search for tasks; none for beat, which sends them by name."""
    return [] if "beat" in sys.argv[1:] else [tasks.__name__]


@functools.cache
def load_kernels() -> None:
    """Load the kernels of tasks that plan, order or simulate, once, if this worker takes such tasks. Log a failure.

    A pool process that loads them itself takes two seconds and 60 MB.
    """
    if not COMPUTED_FROM & set(app.amqp.queues.consume_from):
        return
    from controlplane.planning.sizing import working  # noqa: F401 (what a capacity plan needs, whose asker waits)
    from controlplane.simulation.running import warm_up
    from scheduling.queueing import global_scheduler

    try:
        warm_up()
        global_scheduler.warm_up()
    except Exception:
        logging.getLogger(__name__).exception("kernels are loaded by the first task that needs them")


@signals.worker_before_create_process.connect
def share_memory(**_: Any) -> None:
    """Hide loaded objects from the garbage collector, whose writes would copy their pages into each pool process."""
    load_kernels()
    gc.collect()
    gc.freeze()


@signals.worker_init.connect
def survive_the_loss_of_the_broker(**_: Any) -> None:
    """Have a channel whose connection was given up fail as one without a connection, which Celery expects.

    kombu 5.7 raises AttributeError instead, which ends a worker whose Redis restarts while it holds a message.
    """
    from kombu.transport.redis import Channel

    kind: Any = Channel
    parameters = kind._connparams

    def checked(channel: Any, *args: Any, **options: Any) -> Any:
        if channel.connection.client is None:
            raise ConnectionError("the connection to the broker was given up")
        return parameters(channel, *args, **options)

    kind._connparams = checked


@signals.worker_ready.connect
def announce_nodes(**_: Any) -> None:
    """Have this worker, as the agent of each node on whose queue it listens, announce its host."""
    for queue in app.amqp.queues.consume_from:
        if name := queue.removeprefix("node.") if queue.startswith("node.") else "":
            app.send_task("workers.tasks.nodes.announce", args=(name,), queue=queue)
        elif queue == "ray":
            app.send_task("workers.tasks.ray.join_ray", queue=queue)


@signals.task_postrun.connect
def give_memory_back(task: Any, **_: Any) -> None:
    """Return memory that a long task freed to the machine: glibc would keep it in each pool process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if task.soft_time_limit and trim is not None:
        trim(0)


app = Celery("pilothouse", task_cls="controlplane.jobs.task:RecordedTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
for module in pkgutil.iter_modules(tasks.__path__):
    app.autodiscover_tasks(packages, related_name=module.name)
