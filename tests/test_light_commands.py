"""Commands start in a second or two: what computes, draws or serves is read when it is needed, and not for `--help`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYDAY = ("accounts.sign_in_link", "accounts.create_key", "fleet.apply")
COMPUTING = (
    "simulation.whatif.simulate", "experiments.reproduce", "planning.backtest", "simulation.replay", "gateway.up",
)  # fmt: skip
HEAVY = {"numba", "torch", "plotly", "pandas", "ninja", "sklearn", "statsmodels", "highspy"}

STARTED = """
import sys
from importlib import import_module
import django
django.setup()
from django.core.management import CommandParser
for name in sys.argv[1:]:
    app, _, command = name.rpartition(".")
    made = import_module(f"controlplane.{app}.management.commands.{command}").Command()
    assert made.requires_system_checks == [], f"{name} checks all URLs first, which reads everything"
    made.create_parser("manage.py", command)
    if command == "simulate":  # a scenario is checked, and its requests drawn, before anything is compiled or loaded
        from pathlib import Path
        from scheduling.simulation.scenario import load_scenario
        from scheduling.simulation.staging import stage
        path = Path("docs/scenarios/reactive.toml")
        stage(load_scenario(path), path)
print(" ".join({module.partition(".")[0] for module in sys.modules}))
"""


def test_commands_read_nothing_heavy_before_they_work() -> None:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "PILOTHOUSE_DEBUG": "1"}
    command = [sys.executable, "-c", STARTED, *EVERYDAY, *COMPUTING]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())
