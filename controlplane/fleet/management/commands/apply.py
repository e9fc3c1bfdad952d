"""`manage.py apply FLEET.toml`: apply a fleet file to the inventory."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.fleet.inventory.fleet_file import Change, FleetFileError, apply, read

MARKS = {"create": "+", "change": "~", "delete": "-"}
ACTOR = "apply"


class Command(BaseCommand):
    help = (
        "Create and change rows of the inventory until it is what a TOML file says: regions, GPU types, nodes, models, "
        "deployments, instances, SLO classes and tenants. Shows the difference first. Running it again changes nothing."
    )
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="a fleet file, see docs/operate/fleet-file.md")
        parser.add_argument("--dry-run", action="store_true", help="show and check the difference, change nothing")
        parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
        parser.add_argument(
            "--prune",
            action="store_true",
            help="also delete rows that the file does not name, of the kinds that it has tables of",
        )

    def handle(self, *args: Any, file: Path, dry_run: bool, yes: bool, prune: bool, **options: Any) -> None:
        try:
            entries = read(file)
            changes = apply(entries, ACTOR, prune=prune, dry_run=True)
            if not changes:
                self.stdout.write("Nothing to change: the inventory is what the file says.")
                return
            self._show(changes)
            if dry_run:
                self.stdout.write("Dry run: nothing is changed.")
                return
            if not yes and not self._agreed():
                raise CommandError("Nothing is changed.")
            done = apply(entries, ACTOR, prune=prune)
        except FleetFileError as error:
            raise CommandError(str(error)) from error
        if done != changes:
            self.stdout.write("The inventory has changed meanwhile. What is done:")
            self._show(done)
        self.stdout.write("Applied.")

    def _agreed(self) -> bool:
        if not sys.stdin.isatty():
            raise CommandError("Nothing is changed: add --yes where there is no terminal to ask.")
        return input("Apply these changes? [y/N] ").strip().lower() in {"y", "yes"}

    def _show(self, changes: list[Change]) -> None:
        for change in changes:
            self.stdout.write(f"{MARKS[change.verb]} {change.kind.title} {change.label}")
            for name, (before, after) in change.values.items():
                arrow = f"{_text(before)} -> " if change.verb == "change" else ""
                self.stdout.write(f"    {name}: {arrow}{_text(after)}")
        counts = {verb: sum(change.verb == verb for change in changes) for verb in MARKS}
        self.stdout.write("{create} to create, {change} to change, {delete} to delete.".format_map(counts))


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{name}: {text}" for name, text in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(str, value)) + "]"
        case _:
            return str(value)
