"""Everyday commands start in under a second: what computes, draws or serves is read by those alone that need it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYDAY = ("accounts.sign_in_link", "accounts.create_key", "fleet.apply", "fleet.describe_node")
HEAVY = {"numba", "torch", "plotly", "pandas", "ninja", "sklearn", "statsmodels", "highspy"}

STARTED = """
import sys
from importlib import import_module
import django
django.setup()
from django.core.management import CommandParser
for name in sys.argv[1:]:
    app, command = name.split(".")
    made = import_module(f"controlplane.{app}.management.commands.{command}").Command()
    assert made.requires_system_checks == [], f"{name} checks all URLs first, which reads everything"
    made.create_parser("manage.py", command)
print(" ".join({module.partition(".")[0] for module in sys.modules}))
"""


def test_everyday_commands_read_nothing_heavy() -> None:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "PILOTHOUSE_DEBUG": "1"}
    command = [sys.executable, "-c", STARTED, *EVERYDAY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())
