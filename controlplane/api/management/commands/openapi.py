"""`manage.py openapi`: the OpenAPI document of `/api`, for generated clients, kept so that a review sees changes."""

import json
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from controlplane.api.urls import api

DOCUMENT = Path(settings.BASE_DIR) / "docs" / "openapi.json"


def document() -> str:
    """The text that `docs/openapi.json` should hold."""
    return json.dumps(api.get_openapi_schema(), indent=2, ensure_ascii=False) + "\n"


class Command(BaseCommand):
    help = "Print the OpenAPI document of /api, or keep docs/openapi.json up to date."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--write", action="store_true", help="write docs/openapi.json instead of printing")

    def handle(self, *, write: bool, **options: object) -> None:
        if write:
            DOCUMENT.write_text(document())
            self.stdout.write(f"Wrote {DOCUMENT}.")
        else:
            self.stdout.write(document(), ending="")
