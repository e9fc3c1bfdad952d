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

# Lines, blank ones and comments included. Raise one only with a comment alongside it that says what its users got for it.
BUDGETS: dict[str, int] = {
    "controlplane": 2266,  # streams and bodies without ASGI messages, memory that is kept; what is asked and not served
    "controlplane/accounts": 1186,  # budgets
    "controlplane/alerts": 903,
    "controlplane/api": 3668,  # /v1 in the OpenAPI document; ETag and If-Match of each row
    "controlplane/applications": 2444,  # runs and demand graphs
    "controlplane/batches": 1798,  # Speed up, embeddings
    "controlplane/console": 13659,  # batches, spot pool, budgets, applications, what-if rows of fallbacks and weights
    "controlplane/dispatch": 8825,  # KV events, and what else it has
    "controlplane/events": 459,  # nothing is overwritten unseen
    "controlplane/experiments": 5109,  # rules with evictions, readings of slack, mixes that nothing was tuned on
    "controlplane/fleet": 6239,  # donations, weights by region
    "controlplane/formats": 8,
    "controlplane/gateway": 10933,  # embeddings and other calls without output, conversations by stored responses, KV events
    "controlplane/jobs": 703,
    "controlplane/lengths": 2208,  # the service stands with its rows; gateway/lengths is gone
    "controlplane/planning": 5368,  # capacity as it was then, fallbacks and weights as a scenario, rows of a bundle
    "controlplane/resources": 2461,  # lists declared once: instances, nodes, models, jobs, settings, lengths, spot, budgets
    "controlplane/simulation": 6355,  # effects over all seeds, futures with other fallbacks and weights
    "controlplane/supervisor": 1261,
    "controlplane/tuning": 357,
    "controlplane/usage": 752,  # dollars by use
    "forecasting": 272,  # the models extra is looked for once
    "forecasting/lengths": 4466,
    "forecasting/workload": 2255,  # boosted trees in the blend, weights by time of day
    "scheduling": 1516,  # knobs of a policy, declared once
    "scheduling/applications": 2341,  # where runs stand, late runs last, prewarming that follows its use
    "scheduling/fleet": 1556,  # the state of a fleet as one record
    "scheduling/lookahead": 393,
    "scheduling/planning": 2268,
    "scheduling/queueing": 6454,  # orders by run and by share
    "scheduling/routing": 1843,  # use by engine time
    "scheduling/scaling": 1595,  # one owner of an endpoint for floor, strategies and plans
    "scheduling/simulation": 14479,  # donated instances, application runs, fallbacks of models as live
    "static/admin": 138,
    "static/console": 2383,  # a live connection that leaves a silent socket
    "templates": 28,
    "templates/admin": 89,
    "templates/console": 2826,  # places, undeploy and retire, models that served
    "tests": 2765,  # methods that nothing shipped calls
    "tests/access": 1348,
    "tests/accounts": 525,
    "tests/alerts": 496,
    "tests/api": 1903,
    "tests/applications": 1496,
    "tests/batches": 1300,  # the real SDK, kills
    "tests/bench": 6829,  # what periodic jobs hold the event loop for
    "tests/clients": 1485,  # real clients of the field, coding agents among them
    "tests/console": 7575,
    "tests/dispatch": 5812,  # fallbacks and sleeping models under both clocks
    "tests/docs": 1706,  # examples of the API page, Grafana's own types
    "tests/e2e": 2561,
    "tests/events": 106,
    "tests/experiments": 1121,
    "tests/fleet": 4120,
    "tests/forecasting": 2775,
    "tests/gateway": 10799,  # KV events, and what else it has
    "tests/jobs": 458,
    "tests/lengths": 1644,
    "tests/oracles": 2178,
    "tests/planning": 5074,
    "tests/replay": 1301,
    "tests/scheduling": 14524,
    "tests/simulation": 3630,
    "tests/supervisor": 1311,
    "tests/tuning": 287,
    "tests/usage": 366,
    "tests/vllm": 4162,  # conversations by stored responses, KV events
    "tests/workers": 3339,
    "workers": 179,
    "workers/backends": 310,
    "workers/emulator": 4194,  # conversations by stored responses, KV events
    "workers/tasks": 1045,
    "workers/vllm": 2201,
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


def overspent(lines: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """What is wrong with *lines* under *budgets*."""
    wrong = [f"{package} has no budget" for package in lines if package not in budgets]
    wrong += [f"{package} has a budget and no lines" for package in budgets if package not in lines]
    return wrong + [
        f"{package} has {count} lines, {count - budgets[package]} more than its budget"
        for package, count in lines.items()
        if count > budgets.get(package, count)
    ]


def named_for_nothing(root: Path) -> list[str]:
    """Modules whose names say nothing of what is in them."""
    names = [path.relative_to(root) for path in modules(root)]
    return [str(name) for name in names if NAMES_THAT_SAY_NOTHING & {name.stem, *name.parts[:-1]}]


def test_no_package_has_more_lines_than_its_budget():
    assert overspent(lines_of(ROOT), BUDGETS) == []


def test_modules_are_named_after_what_they_hold():
    assert named_for_nothing(ROOT) == []


def test_every_kind_of_module_counts():
    looked_at = modules(ROOT)
    assert Path(__file__) in looked_at
    assert ROOT / "manage.py" not in looked_at
    assert {path.relative_to(ROOT).parts[0] for path in looked_at} == set(FOLDERS)


def test_what_is_over_unknown_or_gone_is_named(tmp_path):
    def write(name: str, lines: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)

    write("scheduling/compiled.py", 2)
    write("scheduling/fleet/arrays.py", 30)
    write("scheduling/fleet/deep/profile.py", 12)
    write("static/vendor/plotly/plotly.js", 9000)
    write("controlplane/fleet/migrations/0001_initial.py", 900)
    write("controlplane/fleet/utils.py", 3)
    write("workers/helpers/words.py", 3)
    lines = lines_of(tmp_path)
    assert lines == {"controlplane/fleet": 3, "scheduling": 2, "scheduling/fleet": 42, "workers/helpers": 3}
    assert overspent(lines, lines) == []
    budgets = {"controlplane/fleet": 5, "scheduling": 2, "scheduling/fleet": 40, "scheduling/gone": 7}
    assert overspent(lines, budgets) == [
        "workers/helpers has no budget",
        "scheduling/gone has a budget and no lines",
        "scheduling/fleet has 42 lines, 2 more than its budget",
    ]
    assert named_for_nothing(tmp_path) == ["controlplane/fleet/utils.py", "workers/helpers/words.py"]


if __name__ == "__main__":
    print("\n".join(f'    "{package}": {count},' for package, count in lines_of(ROOT).items()))
