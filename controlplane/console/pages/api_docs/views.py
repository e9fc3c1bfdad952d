"""`/api/docs`: what `/v1` and `/api` answer, drawn by the server from OpenAPI documents; nothing comes from elsewhere."""

from functools import lru_cache
from typing import Any

import orjson
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import resolve, reverse
from django.views.decorators.http import require_safe

from controlplane.console.pages.api_docs import inference
from controlplane.console.pages.api_docs.document import Document, Section
from controlplane.console.pages.keys.examples import model_to_try

OPENAPI = "api:openapi-json"


@require_safe
@login_required
def api_docs(request: HttpRequest) -> HttpResponse:
    """Every operation of the tenants' and the operators' API."""
    base_url = request.build_absolute_uri("/").rstrip("/")
    sections = [*Document(inference.document(model_to_try()), base_url).sections(), *_of_api(base_url)]
    context = {
        "sections": sections,
        "operations_total": sum(len(section.operations) for section in sections),
        "document_url": reverse(OPENAPI),
    }
    return render(request, "console/api_docs/api_docs.html", context)


@lru_cache(maxsize=8)  # of the addresses that this site has
def _of_api(base_url: str) -> tuple[Section, ...]:
    """Sections of the document that `/api` gives of itself; it does not change while the process runs."""
    path = reverse(OPENAPI)
    asked = HttpRequest()
    asked.method, asked.path = "GET", path
    document: dict[str, Any] = orjson.loads(resolve(path).func(asked).content)
    return tuple(Document(document, base_url).sections())
