"""Scenarios: simulations as TOML files with the keys of docs/plan/simulation.md. `staging` prepares them to run."""

from scheduling.simulation.scenario.file import load_scenario
from scheduling.simulation.scenario.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import ScenarioError, wrong_at

__all__ = ["Scenario", "ScenarioError", "load_scenario", "wrong_at"]
