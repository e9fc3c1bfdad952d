from typing import Any

import uvloop
from django.core.management.base import BaseCommand, CommandError, CommandParser


class Command(BaseCommand):
    help = "Choose instances for the requests of gateways such as Envoy (docs/operate/picker.md). Ctrl-C ends it."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--listen", default="127.0.0.1:9002", help="address for gRPC (default %(default)s)")
        parser.add_argument("--whole", action="store_true", help="decide in this process, where no other one does")
        parser.add_argument("--grace", type=float, default=30.0, help="seconds for open requests at its end")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            from controlplane.picker.server import serve
        except ModuleNotFoundError as error:
            raise CommandError(f"{error.name} is missing: install pilothouse[picker].") from error
        uvloop.run(serve(options["listen"], "whole" if options["whole"] else "relay", options["grace"]))
