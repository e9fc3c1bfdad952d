"""What is checked by reading the source: `python -m tests.lint` (of `make lint`)."""

import sys

from tests.lint import dead_code, layers, tasks, words

CHECKS = (layers.faults, dead_code.faults, tasks.faults, words.faults)

if __name__ == "__main__":
    found = [fault for check in CHECKS for fault in check()]
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
