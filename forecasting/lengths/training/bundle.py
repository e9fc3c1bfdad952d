"""Build the bundled student again: python -m forecasting.lengths.training.bundle FOLDER-OF-DATA-SETS

It learns from the sets whose licence lets a fitted model be shipped (`datasets.FREE`), nine tenths of their prompts (the
rest is for the test), alone and with made histories (`histories`). Tenants are hidden: those of a deployment are none of
theirs. Names of served models stay, so that the verbosity of a known one is known from the start. The same data, seed and
packages give the same file.
"""

import argparse
from pathlib import Path

from forecasting.lengths.models.student import BUNDLED, Student
from forecasting.lengths.training.datasets import free_answers
from forecasting.lengths.training.histories import with_histories


def build(folder: Path, path: Path = BUNDLED) -> int:
    """Write the bundled student to *path*; how many samples it learned from. Raises DataMissing without the free sets."""
    samples = with_histories(free_answers(folder))
    Student().fit(samples).save(path)
    path.chmod(0o644)
    return len(samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the bundled student again.")
    parser.add_argument("folder", type=Path, help="with one folder a data set below it")
    parser.add_argument("--to", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.to)
