"""The documentation says what there is: variables, commands, verbs, error codes, metrics, links."""

import ast
import builtins
import re
import tomllib
from pathlib import Path

import pytest
from django.core.management import get_commands

import controlplane
from controlplane.operations import Operations
from tests.clients.environments import CLIENTS
from tests.docs import as_vllm, clients, evidence, experiments, jobs, monitoring, plots
from tests.docs.configuration import BEGIN, END, PAGE, table

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_configuration_table_is_that_of_the_code() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table().strip(), "run `python -m tests.docs.configuration`"


def test_what_differs_from_vllm_is_said() -> None:
    assert as_vllm.PAGE.read_text() == as_vllm.page(), "run `python -m tests.docs.as_vllm`"


def test_the_table_of_experiments_is_that_of_the_registry() -> None:
    written = experiments.PAGE.read_text().partition(experiments.BEGIN)[2].partition(experiments.END)[0].strip()
    assert written == experiments.table().strip(), "run `python -m tests.docs.experiments`"


def test_the_table_of_jobs_is_that_of_its_list_and_at_most_two_thirds_of_the_clicks() -> None:
    written = jobs.PAGE.read_text().partition(jobs.BEGIN)[2].partition(jobs.END)[0].strip()
    assert written == jobs.table().strip(), "run `python -m tests.docs.jobs`"
    assert [job.title for job in jobs.JOBS if job.clicks > job.most or "" in job.hesitations.values()] == []


def test_the_table_of_clients_is_that_of_their_tests() -> None:
    written = clients.PAGE.read_text().partition(clients.BEGIN)[2].partition(clients.END)[0].strip()
    assert written == clients.table().strip(), "run `python -m tests.docs.clients`"
    tests = "".join(path.read_text() for path in (ROOT / "tests/clients").glob("test_*.py"))
    assert [client.title for client in CLIENTS if f"async def {client.test}(" not in tests] == []


def test_the_plots_are_those_of_the_runs_that_are_kept() -> None:
    for name in plots.kept_plots():
        assert (evidence.KEPT / f"{name}.svg").read_text() == plots.draw(name), "run `python -m tests.docs.plots`"


def test_the_tables_of_results_are_those_of_the_runs_that_are_kept() -> None:
    for each in evidence.kept():
        assert (evidence.KEPT / f"{each.name}.md").read_text() == evidence.page(each), (
            "run `python -m tests.docs.evidence`"
        )


def test_what_is_stale_is_said() -> None:
    assert evidence.PAGE.read_text() == evidence.evidence(), "run `python -m tests.docs.evidence`"


@pytest.mark.parametrize(
    ("change", "is_stale"),
    [
        (lambda text: text, False),
        (lambda text: f"# A comment.\n{text}", False),
        (lambda text: text.replace('"""What', '"""Which'), False),
        (lambda text: text.replace("2.0", "3.0"), True),
        (lambda text: text.replace("from entry.near", "from entry.far"), True),
    ],
)
def test_a_result_is_stale_once_code_that_it_imports_differs(tmp_path, monkeypatch, change, is_stale) -> None:
    (tmp_path / "tests/bench").mkdir(parents=True)
    (tmp_path / "entry").mkdir()
    for name in ("tests/__init__.py", "tests/bench/__init__.py", "entry/__init__.py", "entry/far.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "tests/bench/one.py").write_text("def run():\n    from entry import late\n    return late.run()\n")
    late = tmp_path / "entry/late.py"
    late.write_text('"""What runs."""\n\nfrom entry.near import ONE\n\n\ndef run():\n    return 2.0 * ONE\n')
    (tmp_path / "entry/near.py").write_text("ONE = 1\n")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)

    def now() -> str:
        for cached in (evidence.code_hash, evidence._read):
            cached.cache_clear()
        return evidence.code_hash("one")

    before = now()
    late.write_text(change(late.read_text()))
    assert (now() != before) == is_stale


FIGURE = re.compile(r"[-+±~x≈]?\s?[\d.,]+")
TABLE = re.compile(r"^\|[-:| ]+\|\n((?:\|.*\n)+)", re.MULTILINE)
GENERATED = re.compile(r"<!-- table: .*?<!-- end of table -->", re.DOTALL)


def test_no_table_of_figures_is_typed_by_hand() -> None:
    typed = []
    for page in PAGES:
        if page.parent.name == "results" or page == evidence.PAGE:
            continue
        for found in TABLE.finditer(GENERATED.sub("", page.read_text())):
            cells = [cell.strip() for row in found[1].splitlines() for cell in row.strip("|").split("|")[1:]]
            if sum(bool(FIGURE.match(cell.strip("*"))) for cell in cells) > len(cells) / 2:
                typed.append(f"{page.relative_to(ROOT)}: {found[1].splitlines()[0]}")
    assert typed == [], "keep the run (`python -m tests.docs.evidence --add NAME COMMAND`) and name its page"


def test_every_command_is_in_operations() -> None:
    ours = {name for name, app in get_commands().items() if str(app).startswith("controlplane")}
    section = read("docs/operate/operations.md").partition("## Commands\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == ours


def test_every_verb_of_the_makefile_is_in_its_help_and_the_readme() -> None:
    makefile = read("Makefile")
    verbs = set(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[0].split()) - {"help", "tools"}
    assert set(re.findall(r"echo 'make ([\w-]+)", makefile)) == verbs
    readme = read("README.md")
    assert {verb for verb in verbs if f"make {verb}" in readme} == verbs


def test_the_readme_begins_with_exactly_two_commands() -> None:
    block = re.findall(r"```sh\n(.*?)```", read("README.md"), re.DOTALL)[0]
    assert [line.partition("#")[0].strip() for line in block.splitlines()] == ["make run", "make test"]


CODE_AT = {"invalid": 2, "Refused": 2, "_refuse": 2, "refuse": 2}
"""Which positional argument of a call is the code."""


def raised_codes() -> set[str]:
    """Every `code` that the gateway gives an error, as a keyword, as an argument (`CODE_AT`), or by default."""
    codes: set[object] = set()
    for path in (path for side in ("gateway", "dispatch") for path in (ROOT / "controlplane" / side).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                codes |= {word.value.value for word in node.keywords if word.arg == "code" and _is_text(word.value)}
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                at = CODE_AT.get(called, len(node.args))
                if _is_text(*node.args[at : at + 1]):
                    codes.add(node.args[at].value)
            elif isinstance(node, ast.FunctionDef) and node.name == "invalid":
                codes.add(node.args.defaults[-1].value)
    return {str(code) for code in codes}


def _is_text(node: ast.AST | None = None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_error_code_of_the_gateway_is_in_the_api_page() -> None:
    section = read("docs/tenants/api.md").partition("## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d{3} \|([^|]+)\|", section, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)} == raised_codes()


def test_examples_of_the_api_page_define_what_they_use_and_name_models_of_the_demo() -> None:
    blocks = re.findall(r"```python\n(.*?)```", read("docs/tenants/api.md"), re.DOTALL)
    defined, used = set(dir(builtins)), set()
    for node in ast.walk(ast.parse("\n".join(blocks))):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.arg(arg=name) | ast.alias(name=name):
                defined.add(name)
    assert used - defined == set()
    models = {name for block in blocks for name in re.findall(r'model="([^"]+)"', block)}
    demo = {model["name"] for model in tomllib.loads(read("controlplane/fleet/demo.toml"))["models"]}
    assert models - demo == {"whisper-large-v3"}, "of which the page says that the demo has none"


def test_the_metrics_named_in_operations_exist() -> None:
    named = set(re.findall(r"`(pilothouse_\w+)`", read("docs/operate/operations.md")))
    existing = {family.name for family in monitoring.families()}
    lines = re.findall(r"`metrics ([\w ]+)`", read("docs/operate/growing.md"))
    for word in " ".join(lines).split():
        assert any(f"{name}_total".startswith(f"pilothouse_{word}") for name in existing), word
    assert named
    assert lines
    assert {name for name in named if name.removesuffix("_total") not in existing} == set()
    for path in Operations.paths:
        assert f"`{path}`" in read("docs/operate/operations.md")


def test_links_lead_somewhere() -> None:
    broken = []
    for page, link in ((each, link) for each in PAGES for link in LINK.findall(each.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append((str(page.relative_to(ROOT)), link))
    assert not broken


def test_every_decision_is_in_the_index() -> None:
    index = read("docs/adr/README.md")
    for path in sorted(ROOT.glob("docs/adr/0*.md")):
        number, title = path.read_text().splitlines()[0].removeprefix("# ").split(". ", 1)
        assert path.name.startswith(f"{int(number):04d}-")
        assert f"- [{number}. {title}]({path.name})" in index
        for part in ("**Context.**", "**Decision.**", "**Consequences.**"):
            assert part in path.read_text(), path.name


def test_versions_agree() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert project["version"] == controlplane.__version__
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in read("LICENSE")
    versions = re.findall(r"^## \[([^\]]+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == "Unreleased" or versions[0] == project["version"]


def test_settings_and_docs_name_only_variables_that_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`(PILOTHOUSE_[A-Z_]+)", text)) - {"PILOTHOUSE_"}
    assert named <= {row.split("`")[1] for row in table().splitlines()[2:]}
