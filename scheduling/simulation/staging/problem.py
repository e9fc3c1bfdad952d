"""A fault of a scenario's table, found while it is staged."""

from scheduling.simulation.scenario import Key


class ScenarioProblem(ValueError):
    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key
