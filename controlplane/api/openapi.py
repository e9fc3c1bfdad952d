"""The OpenAPI document as a file, so that a change of the API is seen in review and users can generate clients from it."""

import json
from pathlib import Path

from django.conf import settings

from controlplane.api.urls import api

DOCUMENT = Path(settings.BASE_DIR) / "docs" / "openapi.json"


def document() -> str:
    """The text that `docs/openapi.json` should hold."""
    return json.dumps(api.get_openapi_schema(), indent=2, ensure_ascii=False) + "\n"
