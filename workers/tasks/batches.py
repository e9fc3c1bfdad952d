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
    """Check a batch's file and store its lines; return False if that was done before, or another worker does it."""
    return _once(services.validate_batch, batch_id)


@shared_task
def finish(batch_id: int) -> bool:
    """Write the output and error files of a batch and end it; return False as `validate` does."""
    return _once(services.finish_batch, batch_id)


def _once(act: Callable[[int], bool], batch_id: int) -> bool:
    with only_one(f"batch-{batch_id}") as free:
        try:
            return act(batch_id) if free else False
        except ApiError as error:  # the store of files is away: `resume` tries again
            logger.warning("batch %s waits: %s", batch_id, error.message)
            return False


@shared_task
def resume() -> int:
    """Resume batches whose message the broker lost or whose worker died. Return how many."""
    try:
        services.delete_expired_files()
    except ApiError as error:
        logger.warning("expired files wait: %s", error.message)
    validating, finalizing = services.due_work()
    for batch_id in validating:
        validate.delay(batch_id)
    for batch_id in finalizing:
        finish.delay(batch_id)
    return len(validating) + len(finalizing)
