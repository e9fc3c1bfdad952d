"""Conditional changes: lists have an `ETag`, the number of the newest event (`events.since`), and a change with `If-Match`
overwrites nothing unseen.
"""

import re
from collections.abc import Collection

from django.db.models import Model
from ninja.params.functions import Header

from controlplane.api.callers import ApiRequest
from controlplane.api.errors import IF_MATCH, ApiError
from controlplane.events import since

IfMatch = Header(
    "",
    alias=IF_MATCH,
    description="The `ETag` of the list that was read. If another changed the same fields since, nothing is changed: 412 "
    "says who changed what. Without this header the last writer wins.",
)


def tag(request: ApiRequest) -> None:
    """Answer *request* with the ETag of now: the newest event. Called before the rows are read."""
    request.etag = f'"{since.newest()}"'


def event_of(if_match: str) -> str:
    """Return the event that the header names, as forms carry it; empty for none. Raises ApiError 412 for no ETag."""
    if if_match.strip() in ("", "*"):
        return ""
    known = re.fullmatch(r'(?:W/)?"(\d{1,18})"', if_match.strip())
    if known is None:
        text = f"{if_match!r} is no ETag of a list here."
        raise ApiError(412, "precondition_failed", text, IF_MATCH)
    return known[1]


def check(if_match: str, *rows: Model, fields: Collection[str]) -> None:
    """Lock *rows*, and raise Changed if another changed *fields* of them since *if_match*. Rows without a key are locked
    by the caller.
    """
    for model in {type(row): None for row in rows}:
        keys = [row.pk for row in rows if type(row) is model and row.pk]
        list(model._default_manager.select_for_update(of=("self",)).filter(pk__in=keys))
    since.check(event_of(if_match), *rows, fields=fields)
