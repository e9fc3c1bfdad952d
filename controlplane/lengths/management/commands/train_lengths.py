"""`manage.py train_lengths`: train a length model of one kind now, here, and store it as a version."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import training
from controlplane.terminal import console, progress
from forecasting.lengths import MODELS, rests

ACTOR = "train_lengths"
OPTIONS = {
    "tuned": "samples on which encoder and head learn together",
    "epochs": "rounds over them",
    "read": "prompts on which the head learns alone",
    "most_tokens": "tokens read of each prompt, from its end",
    "layers": "layers of the encoder that are kept, from the first; 0: all",
}
BY_SETTING = {
    "tuned": "PILOTHOUSE_LENGTH_ENCODER_SAMPLES",
    "read": "twice PILOTHOUSE_LENGTH_ENCODER_SAMPLES",
    "layers": "PILOTHOUSE_LENGTH_ENCODER_LAYERS",
}


class Command(BaseCommand):
    help = (
        "Train a length model from stored samples, or from a file with one JSON object a line (text, output_tokens, and"
        " model, tenant, slo_class, prompt_tokens, max_tokens where they are known), and put it into the shadow."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("kind", choices=list(MODELS))
        parser.add_argument("--file", type=Path, help="samples in the place of the stored ones")
        parser.add_argument("--reason", default="manage.py train_lengths")
        group = parser.add_argument_group("effort of models on an encoder")
        for name, about in OPTIONS.items():
            default = BY_SETTING.get(name) or getattr(training.FITTING, name)
            group.add_argument(
                f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{about} (default {default})"
            )

    def handle(self, *args: Any, **options: Any) -> None:
        fitting = replace(
            training.usual_fitting(), **{name: options[name] for name in OPTIONS if options[name] is not None}
        )
        wrong = [name for name in OPTIONS if getattr(fitting, name) < (name != "layers")]
        if wrong:
            raise CommandError(f"{', '.join(wrong)}: at least 1 (of layers 0) is wanted.")
        if reason := rests(options["kind"]):
            raise CommandError(reason, returncode=2)
        with progress(quiet=False) as report:
            row = training.queue(options["kind"], ACTOR, options["reason"])
            try:
                row = training.run(row, options["file"], replace(fitting, progress=report))
            except (ActionError, ValueError) as error:
                raise CommandError(str(error)) from error
        version = row.version
        assert version is not None
        measures = version.measures
        active = measures["active_mae"]
        against = "" if active is None else f", {measures['active']} {active:.1f}"
        console(self.stdout).print(
            f"{version} is {version.state}: trained on {version.samples:,} samples; mean absolute error of"
            f" {measures['mae']:.1f} tokens on {measures['held_out']:,} held-out ones{against}."
        )
