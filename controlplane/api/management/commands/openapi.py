"""`manage.py openapi`: print the OpenAPI document of `/api`, or write it to `docs/openapi.json`."""

from django.core.management.base import BaseCommand, CommandParser

from controlplane.api.openapi import DOCUMENT, document


class Command(BaseCommand):
    help = "Print the OpenAPI document of /api, or keep docs/openapi.json up to date."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--write", action="store_true", help="write docs/openapi.json instead of printing")

    def handle(self, *, write: bool, **options: object) -> None:
        if write:
            DOCUMENT.write_text(document())
            self.stdout.write(f"Wrote {DOCUMENT}.")
        else:
            self.stdout.write(document(), ending="")
