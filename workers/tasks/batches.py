"""Reading the files of batches before they run, and writing them when they have ended."""

from celery import shared_task

from controlplane.batches import services
from workers.tasks.planning import only_one


@shared_task
def validate(batch_id: int) -> bool:
    """Check a batch's file and store its lines; return False if that was done before, or another worker does it."""
    with only_one(f"batch-{batch_id}") as free:
        return services.validate_batch(batch_id) if free else False


@shared_task
def finish(batch_id: int) -> bool:
    """Write the output and error files of a batch and end it; return False as `validate` does."""
    with only_one(f"batch-{batch_id}") as free:
        return services.finish_batch(batch_id) if free else False


@shared_task
def resume() -> int:
    """Resume batches whose message the broker lost or whose worker died. Return how many."""
    services.delete_expired_files()
    validating, finalizing = services.due_work()
    for batch_id in validating:
        validate.delay(batch_id)
    for batch_id in finalizing:
        finish.delay(batch_id)
    return len(validating) + len(finalizing)
