"""Tasks that read the files of batches before they run, and write them when they have ended."""

import logging
from collections.abc import Callable

from celery import shared_task

from controlplane.batches import services
from controlplane.gateway.errors import ApiError
from workers.tasks.planning import only_one

logger = logging.getLogger(__name__)


@shared_task
def validate(batch_id: int) -> bool:
    """Check a batch's file and store its lines; return False if that was done before, or files of another are worked on."""
    return _alone(services.validate_batch, batch_id)


@shared_task
def finish(batch_id: int) -> bool:
    """Write the output and error files of a batch and end it; return False as `validate` does."""
    return _alone(services.finish_batch, batch_id)


def _alone(act: Callable[[int], bool], batch_id: int) -> bool:
    """Work on one batch at a time, and send the next afterwards: large files must not occupy the processes that carry out
    fleet operations.
    """
    with only_one("batch-files") as free:
        if not free:
            return False
        try:
            done = act(batch_id)
        except ApiError as error:  # the store of files is away: `resume` tries again
            logger.warning("batch %s waits: %s", batch_id, error.message)
            return False
    _send(most=1)
    return done


def _send(most: int | None = None) -> int:
    """Send tasks for batches that wait, those first that only have to be written. Return how many."""
    validating, finalizing = services.due_work()
    due = [*((finish, pk) for pk in finalizing), *((validate, pk) for pk in validating)][:most]
    for task, pk in due:
        task.delay(pk)
    return len(due)


@shared_task
def resume() -> int:
    """Resume batches whose message the broker lost or whose worker died. Return how many."""
    try:
        services.delete_expired_files()
    except ApiError as error:
        logger.warning("expired files wait: %s", error.message)
    return _send()
