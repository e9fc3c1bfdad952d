"""What is wrong with a table of a scenario, found while it is made ready to run."""

from scheduling.simulation.scenario import Key


class ScenarioProblem(ValueError):
    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key
