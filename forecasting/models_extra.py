"""The extra `pilothouse[models]`: torch and transformers, for PreServe's mLSTM, length models on encoders, sizes of models.

It takes a gigabyte, and a first start does not wait for it: nothing imports it before it is needed. Code that needs it
checks here, and names the one command that installs it; no restart is needed then.
"""

from importlib.util import find_spec
from typing import Final

PACKAGES: Final = ("torch", "transformers")
COMMAND: Final = "make models"

_installed: set[str] = set()
"""Those of `PACKAGES` that are installed; looking costs as much as a query, and pages ask of each forecaster."""


class ModelsExtraMissing(ValueError):
    """A feature needs the models extra; the text is a sentence on which, with the command that installs it."""


def is_installed() -> bool:
    """Return whether it can be imported; nothing is imported here."""
    _installed.update(name for name in PACKAGES if name not in _installed and find_spec(name) is not None)
    return _installed.issuperset(PACKAGES)


def missing_for(what: str) -> str:
    """Return why *what*, the subject of a sentence, rests: it needs the extra. Empty if that is installed."""
    if is_installed():
        return ""
    return f"{what} needs {' and '.join(PACKAGES)}, which are not installed: run `{COMMAND}`."


def require(what: str) -> None:
    """Raise ModelsExtraMissing where *what* rests."""
    if reason := missing_for(what):
        raise ModelsExtraMissing(reason)
