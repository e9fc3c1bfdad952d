"""`manage.py make_tiny_model DIR`: a tiny random Llama that real vLLM serves on a CPU."""

import os
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from forecasting import models_extra
from workers.vllm import tiny_model


class Command(BaseCommand):
    help = "Write a tiny random Llama with tokenizer and chat template, for trying real vLLM on a CPU."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("directory", type=Path)
        parser.add_argument("--seed", type=int, default=0, help="Seed of the weights.")

    def handle(self, *args: Any, directory: Path, seed: int, **options: Any) -> None:
        if models_extra.is_installed():
            tiny_model.write(directory, seed)
        elif settings.VLLM_PYTHON:
            self._write_elsewhere(directory, seed)
        else:
            raise CommandError(
                f"{models_extra.missing_for('Writing a model')[:-1]}, or `make vllm` and set VLLM_PYTHON to its Python.",
                returncode=2,
            )
        self.stdout.write(f"Wrote a tiny Llama to {directory}")

    def _write_elsewhere(self, directory: Path, seed: int) -> None:
        """Run it with the Python of the vLLM environment."""
        command = [
            settings.VLLM_PYTHON,
            "-m",
            "workers.vllm.tiny_model",
            str(directory.absolute()),
            "--seed",
            str(seed),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, cwd=settings.BASE_DIR, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise CommandError(f"VLLM_PYTHON: {settings.VLLM_PYTHON} cannot be started: {error.strerror}") from error
        if done.returncode != 0:
            raise CommandError(f"{settings.VLLM_PYTHON} could not write the model:\n{done.stderr.strip()[-2000:]}")
