"""Pulls of weights into regions."""

import logging
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from controlplane.fleet.models import WeightsState
from controlplane.fleet.weights import selectors, services
from workers.celery import app
from workers.tasks.planning import only_one

logger = logging.getLogger(__name__)
PULL_LIMIT_S = 4 * 3600


def advance_pulls() -> int:
    """Advance every pull in progress; return their number.

    Emulated models have no file: their pull is over when size and bandwidth say so. A model in a folder needs none. For
    one on the Hugging Face hub `download` is started.
    """
    pulling = list(selectors.weights().filter(state=WeightsState.PULLING))
    for row in pulling:
        source = row.model.source
        if row.ready_at is None:  # asked for by a fleet file
            row.ready_at = timezone.now() + timedelta(seconds=selectors.estimate(row.model).seconds)
            row.save(update_fields=["ready_at"])
        if not source and row.ready_at <= timezone.now():
            services.finish(row)
        elif source and Path(source).is_absolute():
            services.finish(row, "" if Path(source).is_dir() else f"there is no folder {source}")
        elif source:
            download.delay(row.pk)
    return len(pulling)


@app.task(soft_time_limit=PULL_LIMIT_S, time_limit=PULL_LIMIT_S + 20)
def download(weights_id: int) -> None:
    """Download the weights of a model from the Hugging Face hub into the cache of this host, unless another task does."""
    with only_one(f"weights-{weights_id}") as free:
        row = selectors.weights().filter(pk=weights_id, state=WeightsState.PULLING).first()
        if not free or row is None:
            return
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            services.finish(row, "downloads need the models extra: pip install 'pilothouse[models]'")
            return
        try:
            snapshot_download(row.model.source)
        except Exception as error:
            logger.warning("weights: %s could not be downloaded: %s", row.model.source, error)
            services.finish(row, f"{type(error).__name__}: {error}")
        else:
            services.finish(row)
