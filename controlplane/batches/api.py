"""`/v1/files` and `/v1/batches`, as OpenAI's Files and Batch API. Django serves them: none is on the path of a request."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from asgiref.sync import sync_to_async
from django.db.models import Q, QuerySet
from django.db.models.fields.files import FieldFile
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.urls import path

from controlplane.accounts.models import ApiKey
from controlplane.batches import services
from controlplane.batches.models import Batch, Purpose, StoredFile
from controlplane.batches.storage import store_errors
from controlplane.gateway.errors import ApiError, invalid, quoted
from controlplane.gateway.key_endpoints import endpoint

READ_BYTES = 256 * 1024
MAX_METADATA = 16
WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")  # Python refuses to read thousands of digits


def page_of(request: HttpRequest, rows: QuerySet[Any], default: int, most: int, key: str = "pk") -> JsonResponse:
    """A page of *rows*, newest first unless `order` is asc, after the row whose *key* is `after`."""
    parameters = request.GET
    limit_text = parameters.get("limit", str(default))
    if not WHOLE_NUMBER.fullmatch(limit_text) or not 1 <= int(limit_text) <= most:
        raise invalid(f"limit must be from 1 to {most}, not {quoted(limit_text)}.", "limit")
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, not {quoted(order)}.", "order")
    limit, rising = int(limit_text), order == "asc"
    if after := parameters.get("after"):
        last = rows.filter(**{key: after}).first()
        if last is None:
            raise invalid(f"after names {quoted(after)}, which does not exist.", "after")
        compare = "gt" if rising else "lt"
        rows = rows.filter(
            Q(**{f"created_at__{compare}": last.created_at})
            | Q(created_at=last.created_at, **{f"pk__{compare}": last.pk})
        )
    sign = "" if rising else "-"
    rows_and_next = list(rows.order_by(f"{sign}created_at", f"{sign}pk")[: limit + 1])
    shown = [row.to_dict() for row in rows_and_next[:limit]]
    ids = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": shown, **ids, "has_more": len(rows_and_next) > limit})


# Files


def file_of(key: ApiKey, file_id: str, param: str = "file_id") -> StoredFile:
    row = StoredFile.objects.filter(pk=file_id, tenant=key.tenant).first()
    if row is None:
        raise ApiError(404, f"No such File object: {file_id}", code="not_found", param=param)
    return row


def list_files(request: HttpRequest, key: ApiKey) -> HttpResponseBase:
    rows = StoredFile.objects.filter(tenant=key.tenant)
    if purpose := request.GET.get("purpose"):
        rows = rows.filter(purpose=purpose)
    return page_of(request, rows, default=10_000, most=10_000)


def upload_file(request: HttpRequest, key: ApiKey) -> HttpResponseBase:
    content = request.FILES.get("file")
    if content is None:
        raise invalid("Send the file as the form field file of multipart/form-data.", "file")
    seconds = request.POST.get("expires_after[seconds]")
    if seconds is not None and not WHOLE_NUMBER.fullmatch(seconds):
        name = "expires_after[seconds]"
        raise invalid(f"{name} must be a whole number, not {quoted(seconds)}.", name)
    purpose = request.POST.get("purpose", "")
    if purpose != Purpose.BATCH:
        raise invalid(f"purpose must be batch, not {quoted(purpose)}: files are kept as input of batches.", "purpose")
    row = services.create_file(
        key.tenant,
        content,
        content.name or "",
        purpose,
        expires_after_s=None if seconds is None else int(seconds),
    )
    return JsonResponse(row.to_dict())


def show_file(request: HttpRequest, key: ApiKey, file_id: str) -> HttpResponseBase:
    return JsonResponse(file_of(key, file_id).to_dict())


def delete_file(request: HttpRequest, key: ApiKey, file_id: str) -> HttpResponseBase:
    services.delete_file(file_of(key, file_id))
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


def file_content(request: HttpRequest, key: ApiKey, file_id: str) -> HttpResponseBase:
    return content_of(file_of(key, file_id))


def content_of(row: StoredFile) -> HttpResponseBase:
    """Return the content of *row* as a download. Raises ApiError 404 if it is gone, 503 if the store fails."""
    with store_errors(f"read {row.id}"):
        file = row.content.open("rb")
    headers = {
        "Content-Disposition": f'attachment; filename="{row.id}.jsonl"',
        "Content-Length": str(row.size_bytes),
        "Content-Encoding": "identity",  # Django compresses each piece by itself, and clients read the first alone
    }
    return StreamingHttpResponse(FileChunks(file), content_type="application/jsonl", headers=headers)


class FileChunks:
    """*file* in pieces, read off the event loop: Django would read the whole of a plain iterator first."""

    def __init__(self, file: FieldFile) -> None:
        self._file = file
        self.close = file.close
        """Called by Django at the end of the response, also if the client left."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await sync_to_async(self._file.read)(READ_BYTES):
            yield piece


# Batches


def batch_of(key: ApiKey, batch_id: str) -> Batch:
    row = Batch.objects.filter(public_id=batch_id, tenant=key.tenant).first()
    if row is None:
        raise ApiError(404, f"No batch found with id '{batch_id}'.", code="not_found", param="batch_id")
    return row


def list_batches(request: HttpRequest, key: ApiKey) -> HttpResponseBase:
    return page_of(request, Batch.objects.filter(tenant=key.tenant), default=20, most=100, key="public_id")


def create_batch(request: HttpRequest, key: ApiKey) -> HttpResponseBase:
    if request.content_type == "multipart/form-data":  # in which `refuse_nul` does not look
        raise invalid("The body must be JSON, not a form.", code="invalid_json")
    try:
        body: Any = msgspec.json.decode(request.body)  # unlike `json`, it takes no half of a surrogate pair
    except (ValueError, RecursionError):
        raise invalid("The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    expiry = body.get("output_expires_after")
    if expiry is not None and not (isinstance(expiry, dict) and isinstance(expiry.get("seconds"), int)):
        raise invalid("output_expires_after must have anchor and seconds.", "output_expires_after")
    file_id = body.get("input_file_id")
    if not isinstance(file_id, str):
        raise invalid("`input_file_id` must be the id of a file.", "input_file_id", code="missing_required_parameter")
    batch = services.create_batch(
        key,
        file_of(key, file_id, "input_file_id"),
        body.get("endpoint", ""),
        body.get("completion_window", ""),
        metadata=metadata_of(body.get("metadata")),
        output_expires_after_s=expiry["seconds"] if expiry else None,
    )
    return JsonResponse(batch.to_dict())


def metadata_of(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    texts = isinstance(value, dict) and all(
        isinstance(name, str) and len(name) <= 64 and isinstance(text, str) and len(text) <= 512
        for name, text in value.items()
    )
    if not isinstance(value, dict) or not texts or len(value) > MAX_METADATA:
        raise invalid(
            "metadata must have at most 16 pairs of texts: keys to 64 and values to 512 characters.", "metadata"
        )
    return value


def show_batch(request: HttpRequest, key: ApiKey, batch_id: str) -> HttpResponseBase:
    return JsonResponse(batch_of(key, batch_id).to_dict())


def cancel_batch(request: HttpRequest, key: ApiKey, batch_id: str) -> HttpResponseBase:
    batch = batch_of(key, batch_id)
    services.cancel_batch(batch)
    return JsonResponse(batch.to_dict())


urlpatterns = [
    path("v1/files", endpoint(GET=list_files, POST=upload_file)),
    path("v1/files/<str:file_id>", endpoint(GET=show_file, DELETE=delete_file)),
    path("v1/files/<str:file_id>/content", endpoint(GET=file_content)),
    path("v1/batches", endpoint(GET=list_batches, POST=create_batch)),
    path("v1/batches/<str:batch_id>", endpoint(GET=show_batch)),
    path("v1/batches/<str:batch_id>/cancel", endpoint(POST=cancel_batch)),
]
