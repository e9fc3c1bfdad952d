"""`/api/docs`: what `/v1` and `/api` answer, drawn by the server from OpenAPI documents; nothing comes from elsewhere."""

from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import resolve, reverse
from django.views.decorators.http import require_safe

from controlplane.console.pages.api_docs import inference
from controlplane.console.pages.api_docs.document import Document
from controlplane.console.pages.keys.examples import model_to_try

OPENAPI = "api:openapi-json"


class Drawn(NamedTuple):
    """A section as HTML."""

    id: str
    title: str
    operations_total: int
    html: str


@require_safe
@login_required
def api_docs(request: HttpRequest) -> HttpResponse:
    """Every operation of the tenants' and the operators' API."""
    base_url = request.build_absolute_uri("/").rstrip("/")
    sections = [*_of_inference(base_url, model_to_try()), *_of_api(base_url)]
    context = {
        "sections": sections,
        "operations_total": sum(section.operations_total for section in sections),
        "document_url": reverse(OPENAPI),
    }
    return render(request, "console/api_docs/api_docs.html", context)


@lru_cache(maxsize=8)  # of the addresses that this site has, and models to show calls with
def _of_inference(base_url: str, model: str) -> list[Drawn]:
    return _drawn(Document(inference.document(model), base_url))


@lru_cache(maxsize=8)
def _of_api(base_url: str) -> list[Drawn]:
    """Sections of the document that `/api` gives of itself; it does not change while the process runs."""
    path = reverse(OPENAPI)
    asked = HttpRequest()
    asked.method, asked.path = "GET", path
    document: dict[str, Any] = orjson.loads(resolve(path).func(asked).content)
    return _drawn(Document(document, base_url))


def _drawn(document: Document) -> list[Drawn]:
    """Sections of *document*, whose HTML is kept: no page has more to draw."""
    return [
        Drawn(
            section.id,
            section.title,
            len(section.operations),
            render_to_string("console/api_docs/section.html", {"section": section}),
        )
        for section in document.sections()
    ]
