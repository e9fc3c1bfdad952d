"""How many lines each package may have, and that modules are named after what is in them.

Weight is what makes the next feature dear: a package that grows says why, here, next to its number. Lower a budget with the
lines that go. A module is a concept, of any length; it is split when it holds two. `python -m tests.test_budgets` prints the
table as it stands.
"""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("controlplane", "workers", "scheduling", "forecasting", "templates", "static", "tests")
SUFFIXES = {".py", ".js", ".css", ".html"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common"}
NOT_OURS_TO_SHAPE = {"migrations", "vendor", "__pycache__"}

# Lines, blank ones and comments included: what a package may have today, and the aim. Today's numbers descend: a change that
# raises one lowers another by as much. The aims add up to at most 62,000 for controlplane and workers, 31,000 for
# scheduling, 5,600 for forecasting, 58,000 for tests, 3,500 for benchmarks and 4,400 for templates and static.
BUDGETS: dict[str, tuple[int, int]] = {
    "controlplane": (2695, 2050),
    "controlplane/accounts": (893, 810),
    "controlplane/alerts": (999, 640),
    "controlplane/api": (2390, 2200),
    "controlplane/applications": (1590, 1310),
    "controlplane/batches": (1797, 1570),
    "controlplane/console": (9487, 9270),
    "controlplane/dispatch": (9708, 6470),
    "controlplane/events": (300, 230),
    "controlplane/experiments": (4368, 4060),
    "controlplane/fleet": (7182, 4820),
    "controlplane/formats": (8, 8),
    "controlplane/gateway": (7611, 6840),
    "controlplane/jobs": (691, 600),
    "controlplane/lengths": (1444, 1444),
    "controlplane/picker": (482, 479),
    "controlplane/planning": (6635, 4290),
    "controlplane/resources": (3248, 2300),
    "controlplane/simulation": (5130, 4600),
    "controlplane/supervisor": (1307, 1010),
    "controlplane/tuning": (351, 280),
    "controlplane/usage": (1046, 810),
    "forecasting": (272, 210),
    "forecasting/lengths": (3302, 3302),
    "forecasting/workload": (2348, 1780),
    "scheduling": (1563, 1480),
    "scheduling/applications": (2384, 1821),
    "scheduling/control": (2042, 1720),
    "scheduling/fleet": (1885, 1540),
    "scheduling/lookahead": (389, 380),
    "scheduling/planning": (2351, 1976),
    "scheduling/queueing": (6089, 5940),
    "scheduling/routing": (1897, 1800),
    "scheduling/scaling": (1483, 1339),
    "scheduling/simulation": (13466, 12996),
    "static/admin": (124, 120),
    "static/console": (1925, 1890),
    "templates": (17, 17),
    "templates/admin": (31, 31),
    "templates/console": (1907, 1907),
    "tests": (2869, 1700),
    "tests/access": (1277, 880),
    "tests/accounts": (466, 330),
    "tests/alerts": (627, 300),
    "tests/api": (1685, 1410),
    "tests/applications": (1398, 950),
    "tests/batches": (1736, 1180),
    "tests/bench": (8152, 3500),
    "tests/clients": (1513, 990),
    "tests/clocks": (1974, 1140),
    "tests/console": (7212, 4870),
    "tests/dispatch": (5130, 3148),
    "tests/docs": (1992, 1140),
    "tests/e2e": (2402, 1640),
    "tests/events": (106, 70),
    "tests/experiments": (1127, 750),
    "tests/fleet": (5845, 3090),
    "tests/forecasting": (2529, 1860),
    "tests/gateway": (11349, 7245),
    "tests/jobs": (485, 410),
    "tests/lengths": (1303, 1140),
    "tests/lint": (430, 425),
    "tests/oracles": (1345, 1332),
    "tests/picker": (687, 687),
    "tests/planning": (4569, 3150),
    "tests/scheduling": (13682, 9610),
    "tests/simulation": (3001, 2300),
    "tests/supervisor": (1708, 910),
    "tests/traffic": (957, 730),
    "tests/tuning": (335, 230),
    "tests/usage": (692, 450),
    "tests/vllm": (3999, 2690),
    "tests/workers": (2947, 1930),
    "workers": (190, 140),
    "workers/emulator": (3001, 2420),
    "workers/ray": (466, 459),
    "workers/tasks": (1214, 860),
    "workers/traffic": (601, 430),
    "workers/vllm": (2396, 1760),
}


def modules(root: Path) -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in SUFFIXES and not NOT_OURS_TO_SHAPE & set(path.relative_to(root).parts)
    ]


def package_of(name: Path) -> str:
    """`controlplane/fleet` for what is in it or below, `controlplane` for what lies in that folder itself."""
    return "/".join(name.parts[: min(2, len(name.parts) - 1)])


def lines_of(root: Path) -> dict[str, int]:
    """Lines by package, in the order of their names."""
    lines: Counter[str] = Counter()
    for path in modules(root):
        lines[package_of(path.relative_to(root))] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(lines.items()))


def overspent(lines: dict[str, int]) -> list[str]:
    """Return what is wrong with *lines* under the budgets."""
    wrong = [f"{package} has no budget" for package in lines if package not in BUDGETS]
    wrong += [f"{package} has a budget and no lines" for package in BUDGETS if package not in lines]
    return wrong + [
        f"{package} has {count} lines, {count - BUDGETS[package][0]} more than its budget"
        for package, count in lines.items()
        if package in BUDGETS and count > BUDGETS[package][0]
    ]


def named_for_nothing(root: Path) -> list[str]:
    """Modules whose names say nothing of what is in them."""
    names = [path.relative_to(root) for path in modules(root)]
    return [str(name) for name in names if NAMES_THAT_SAY_NOTHING & {name.stem, *name.parts[:-1]}]


def test_no_package_has_more_lines_than_its_budget():
    assert overspent(lines_of(ROOT)) == []


def test_aims_are_not_above_what_there_is():
    assert [package for package, (today, aim) in BUDGETS.items() if aim > today] == []


def test_modules_are_named_after_what_they_hold():
    assert named_for_nothing(ROOT) == []


if __name__ == "__main__":
    aims = {package: aim for package, (_, aim) in BUDGETS.items()}
    for package, count in lines_of(ROOT).items():
        print(f'    "{package}": ({count}, {min(count, aims.get(package, count))}),')
