"""Errors of the store of files, as the answers that tenants get."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from controlplane.gateway.errors import ApiError

logger = logging.getLogger(__name__)
S3_MODULES = ("botocore.", "boto3.", "s3transfer.")
"""Packages whose errors are the store's: the S3 client shares no base class with `OSError`."""


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Raise errors of the store as ApiError: 404 for a file that is gone, 503 for a store that refuses or is away.

    *what* names the operation in the log, where the store's own words are: tenants do not see its address.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(404, "The content of this file is gone.", code="not_found", param="file_id") from error
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(S3_MODULES):
            raise
        logger.error("file store (PILOTHOUSE_FILES_URL) cannot %s: %s", what, error)
        message = "The file store does not serve this request. Nothing was lost: try again later."
        raise ApiError(503, message, code="file_store_unavailable") from error
