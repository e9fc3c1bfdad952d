"""Conditional changes: rows have an `ETag`, and a change with `If-Match` overwrites nothing unseen.

An ETag is the number of the newest event about the rows (`events.since`).
"""

import re
from collections.abc import Collection
from typing import Any

from django.db.models import Model, QuerySet
from django.shortcuts import get_object_or_404
from ninja.params.functions import Header

from controlplane.api.callers import ApiRequest
from controlplane.api.errors import ApiError
from controlplane.events import since
from controlplane.resources.resource import Rows

IF_MATCH = "If-Match"
IfMatch = Header(
    "",
    alias=IF_MATCH,
    description="The `ETag` of what is changed, as it was read. If another changed it since, nothing is changed: 412 says "
    "who changed what. Without this header the last writer wins.",
)


def read(request: ApiRequest, rows: Rows, **key: Any) -> Any:
    """Return the one of *rows* with *key*; the answer has its ETag, which is read first: a change in between is newer."""
    assert isinstance(rows, QuerySet)
    tag(request, get_object_or_404(rows, **key))
    return rows.get(**key)


def tag(request: ApiRequest, *rows: Model) -> None:
    """Answer *request* with the present ETag of *rows*."""
    request.etag = f'"{since.newest(*rows)}"'


def check(request: ApiRequest, if_match: str, *rows: Model, fields: Collection[str] | None = None) -> None:
    """Raise ApiError 412 if *fields* of *rows*, by default any, changed after *if_match*; else lock them, and answer with
    their ETag after the change, which is made in the same transaction. Rows without a key are locked by the caller.
    """
    request.changed = rows
    if not if_match:
        return
    if not rows:
        raise ApiError(412, "precondition_failed", "There is nothing to change yet.", IF_MATCH)
    if if_match.strip() == "*":
        return
    stored = [row for row in rows if row.pk]
    for model in {type(row): None for row in stored}:
        keys = [row.pk for row in stored if type(row) is model]
        list(model._default_manager.select_for_update(of=("self",)).filter(pk__in=keys))
    known = re.fullmatch(r'(?:W/)?"(\d{1,18})"', if_match.strip())
    if known is None:
        raise ApiError(
            412, "precondition_failed", f"{if_match!r} is no ETag of {rows[0]}: read it, and send its own.", IF_MATCH
        )
    if said := since.changes(int(known[1]), *rows, fields=fields):
        text = f"Nothing was changed: since ETag {if_match.strip()}, {said}. Read it again, and send its new ETag."
        raise ApiError(412, "precondition_failed", text, IF_MATCH)
