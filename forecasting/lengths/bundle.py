"""Build the bundled student again: python -m forecasting.lengths.bundle FOLDER-OF-DATA-SETS

It learns from the sets whose licence lets a fitted model be shipped (`datasets.FREE`), all of their prompts, with tenants
hidden: a house's own tenants are none of theirs. Names of served models stay, so that the verbosity of a known one is known
from the start. No teacher: it made the student worse (docs/length-models.md).
"""

import argparse
import dataclasses
from pathlib import Path

from forecasting.lengths.datasets import FREE, read_sets
from forecasting.lengths.query import Sample
from forecasting.lengths.student import BUNDLED, Student


def build(folder: Path, path: Path = BUNDLED) -> int:
    """Fit a student to the free sets below *folder* and write it to *path*; how many samples it learned from."""
    split = read_sets(folder, FREE)
    samples = [
        Sample(dataclasses.replace(sample.query, tenant=""), sample.output_tokens)
        for sample in split.training + split.test
    ]
    Student().fit(samples).save(path)
    path.chmod(0o644)
    return len(samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the bundled student again.")
    parser.add_argument("folder", type=Path, help="with one folder a data set below it")
    parser.add_argument("--to", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.to)
