"""None of the words that `docs/glossary.md` calls old, nor of those that a native engineer stumbles over, is written."""

import re
from collections.abc import Iterator

from tests.lint.source import PACKAGES, ROOT

ODD = (
    "whoever",
    "somebody",
    r"of (?:its|their) own(?! \w)",
    "how far",
    "the begin",
    r"reckon\w*",
    "righted",
    "yardsticks?",
)
MAY = {
    "forecasting/lengths": "turn turns tell", "controlplane/gateway": "turn turns told", "controlplane/lengths": "turns",
    "controlplane/planning/parts.py": "turn tell", "controlplane/resources/instances.py": "aside",
    "controlplane/simulation/whatif/changes/presets.py": "turn", "controlplane/experiments/shipped_lengths.py": "turn turns",
    "scheduling/simulation/workload/traces.py": "turn turns", "scheduling/compiled.py": "home",
    "workers/emulator": "turn hurry", "workers/traffic": "turn turns tell", "workers/vllm/tiny_model.py": "turn house",
    "docs/papers/lengths.md": "turns", "docs/papers/length-models.md": "turns", "docs/operate/operations.md": "house",
    "controlplane/fleet/models": "odd", "controlplane/gateway/models.py": "odd", "controlplane/tuning/models.py": "odd",
}  # fmt: skip
"""Where old words are the right ones; `odd`: help texts of rows, which a migration would change."""


def faults() -> Iterator[str]:
    cells = re.findall(r"^\| [^|]+ \|[^|]+\|[^|]*\| ?([^|]*)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    old = {word for cell in cells for word, name_only in re.findall(r"`([^`]+)`( \(name\))?", cell) if not name_only}
    sought = re.compile(rf"\b({'|'.join(sorted(old))})\b", re.IGNORECASE)
    odd = re.compile(rf"\b({'|'.join(ODD)})\b", re.IGNORECASE)
    code = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "migrations" not in path.parts]
    pages = [*ROOT.glob("templates/**/*.html"), *ROOT.glob("static/console/**/*.js")]
    documents = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "glossary.md"]
    for path in sorted({*code, *pages, *documents}):
        name = path.relative_to(ROOT).as_posix()
        may = {word for place, words in MAY.items() if name.startswith(place) for word in words.split()}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line)
            for match in {
                *sought.findall(text),
                *(odd.findall(text) if path.suffix != ".md" and "odd" not in may else ()),
            }:
                if match.lower() not in may:
                    yield f"{name}:{number}: {match}"
