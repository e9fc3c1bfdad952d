"""Static files: vendored files match their sources, modules find each other, and sizes stay bounded."""

import hashlib
import re
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders

STATIC = Path(__file__).parent.parent.parent / "static"
MODULES = sorted((STATIC / "console/js").glob("*.js"))
SHEETS = sorted((STATIC / "console/css").glob("*.css"))


def test_vendored_files_have_the_hashes_that_are_noted():
    listed = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (STATIC / "vendor/README.md").read_text(), re.M))
    fonts = {str(path.relative_to(STATIC / "vendor")): path for path in (STATIC / "vendor").rglob("*.woff2")}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in fonts.items()}
    for path in fonts.values():
        assert "SIL Open Font License" in (path.parent / "LICENSE").read_text()


def test_plotly_comes_from_its_package():
    assert finders.find("vendor/plotly/plotly.min.js").endswith("plotly/package_data/plotly.min.js")
    assert finders.find("vendor/plotly/nothing.js") is None


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_modules_import_what_is_there(module):
    for name, source in re.findall(r'import \{([^}]+)\} from "\./([\w.]+)";', module.read_text()):
        exported = (STATIC / "console/js" / source).read_text()
        for word in (word.strip() for word in name.split(",")):
            assert re.search(rf"export (?:async )?(?:function|class|const) {word}\b", exported), f"{word} of {source}"


def test_the_live_connection_stays_small():
    assert len((STATIC / "console/js/live.js").read_text().splitlines()) <= 200


def test_every_custom_property_is_a_token():
    tokens = set(re.findall(r"(--[\w-]+):", (STATIC / "console/css/tokens.css").read_text()))
    used = {name for sheet in SHEETS for name in re.findall(r"var\((--[\w-]+)\)", sheet.read_text())}
    assert used <= tokens
