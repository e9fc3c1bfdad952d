"""A module is one concept of a few hundred lines, under a name that says which."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("controlplane", "workers", "scheduling", "forecasting", "templates", "static", "tests")
SUFFIXES = {".py", ".js", ".css"}
MOST_LINES = 400
MOST_LINES_OF_TESTS = 500
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common"}
NOT_OURS_TO_SHAPE = {"migrations", "vendor", "__pycache__"}


def modules(root: Path) -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in SUFFIXES and not NOT_OURS_TO_SHAPE & set(path.relative_to(root).parts)
    ]


def faults(root: Path) -> list[str]:
    """What is wrong with the shape of the modules under *root*."""
    wrong = []
    for path in modules(root):
        name = path.relative_to(root)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        most = MOST_LINES_OF_TESTS if name.parts[0] == "tests" else MOST_LINES
        if lines > most:
            wrong.append(f"{name} has {lines} lines; split it, {most} are the most")
        if NAMES_THAT_SAY_NOTHING & {path.stem, *name.parts[:-1]}:
            wrong.append(f"{name} has a name that says nothing of what is in it")
    return wrong


def test_modules_are_short_and_named_after_what_they_hold():
    assert faults(ROOT) == []


def test_every_kind_of_module_is_looked_at():
    looked_at = modules(ROOT)
    assert Path(__file__) in looked_at
    assert ROOT / "manage.py" not in looked_at
    assert {path.relative_to(ROOT).parts[0] for path in looked_at} >= {"controlplane", "scheduling", "workers", "tests"}


def test_faults_are_found(tmp_path):
    def write(name: str, lines: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)

    write("scheduling/fine.py", 400)
    write("scheduling/long.py", 401)
    write("tests/fine.py", 500)
    write("static/console/long.js", 700)
    write("static/console/long.css", 700)
    write("static/vendor/plotly/plotly.js", 9000)
    write("controlplane/fleet/migrations/0001_initial.py", 900)
    write("controlplane/fleet/utils.py", 3)
    write("workers/helpers/words.py", 3)
    assert [fault.split()[0] for fault in faults(tmp_path)] == [
        "controlplane/fleet/utils.py",
        "workers/helpers/words.py",
        "scheduling/long.py",
        "static/console/long.css",
        "static/console/long.js",
    ]
