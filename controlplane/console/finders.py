"""Static file finder for plotly.js in the installed `plotly` package."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly
from django.contrib.staticfiles.finders import BaseFinder
from django.core.checks import CheckMessage
from django.core.files.storage import FileSystemStorage

PLOTLY_JS = "vendor/plotly/plotly.min.js"
PACKAGE_DATA = Path(plotly.__file__).parent / "package_data"


@cache
def guarded_style_ids() -> tuple[str, ...]:
    """Return the ids that plotly.js checks before it adds a style element (for its maps, which are not used).

    Pages contain an empty element for each id, since the Content-Security-Policy would refuse the added ones.
    """
    text = (PACKAGE_DATA / "plotly.min.js").read_text()
    return tuple(sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text))))


class _OneFile(FileSystemStorage):
    """Storage that exposes the package's file under the path used by pages."""

    prefix = None  # required by `collectstatic`

    def path(self, name: str) -> str:
        return super().path(Path(name).name)


class PlotlyFinder(BaseFinder):
    def __init__(self, app_names: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.storage = _OneFile(location=PACKAGE_DATA)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        if path != PLOTLY_JS:
            return []
        file = self.storage.path(path)
        return [file] if find_all else file

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterator[tuple[str, FileSystemStorage]]:
        yield PLOTLY_JS, self.storage
