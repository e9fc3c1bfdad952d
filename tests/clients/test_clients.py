"""What tenants have: OpenAI's SDKs, LiteLLM, LangChain, LangGraph and load generators, against a gateway, each unchanged."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.applications.models import ApplicationRun
from controlplane.applications.services import follow_runs
from tests.clients import environments
from tests.clients.conftest import CALLS

pytestmark = pytest.mark.clients

ERRORS = {
    "model": ["NotFoundError", 404, "model_not_found"],
    "value": ["BadRequestError", 400, "integer_out_of_range"],
    "key": ["AuthenticationError", 401, "invalid_api_key"],
    "embeddings": ["NotFoundError", 404, "unsupported_endpoint"],
}

EMBEDDED = [3, 32, True, False]
"""Vectors of three texts, their length, whether equal texts have equal vectors, and whether different ones do."""


def check(report, errors):
    assert report["chat"]
    assert report["stream"]
    assert report["usage"] == 8
    assert report["tool"] == "weather"
    assert report["errors"] == errors


def check_batches(report):
    counts = {"total": 3, "completed": 3, "failed": 0}
    assert report["batch"] == {"status": "completed", "counts": counts, "answered": ["a", "b", "c"]}
    assert report["cancelled"] == "cancelled"
    assert report["listed"] == [2, 2]
    assert report["deleted"]


async def test_openai_for_python(said, emulated):
    report = await said("openai")
    check(report, ERRORS)
    assert report["models"] == ["e", "m"]
    assert report["embeddings"] == EMBEDDED
    assert report["response"]
    assert report["events"][0] == "response.created"
    assert report["events"][-1] == "response.completed"
    rows = await emulated.rows()
    assert [row.outcome for row in rows if row.slo_class != "flexible"] == ["done"] * 6
    check_batches(report)


async def test_openai_for_node(run, emulated):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node")
    packages = environments.FOLDER / "node" / "package.json"
    report = json.loads(await run(node, CALLS / "openai_node.mjs", PACKAGES=str(packages)))
    check(report, ERRORS)
    assert report["models"] == ["e", "m"]
    assert report["embeddings"] == EMBEDDED
    assert report["response"]
    assert report["events"][-1] == "response.completed"
    check_batches(report)
    assert report["cut"]  # half a surrogate pair, as JSON.stringify writes it


def check_messages(report):
    assert report["message"]
    assert (report["type"], report["by_token"], report["tool"]) == ("message", "assistant", "weather")
    assert report["stream"]
    assert report["usage"] <= 8
    assert report["tokens"] > 5
    assert report["errors"] == {name: ERRORS[name] for name in ("model", "value", "key")}


async def test_anthropic_for_python(said, emulated):
    check_messages(await said("anthropic"))
    assert {row.surface for row in await emulated.rows()} == {"messages", "messages/count_tokens"}


async def test_anthropic_for_node(run):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node")
    packages = environments.FOLDER / "node" / "package.json"
    check_messages(json.loads(await run(node, CALLS / "anthropic_node.mjs", PACKAGES=str(packages))))


async def test_litellm(said):
    check(await said("litellm"), {name: error[:2] for name, error in ERRORS.items() if name != "embeddings"})


async def test_langchain(said):
    report = await said("langchain")
    check(report, {name: ERRORS[name][:2] for name in ("model", "key")})
    assert report["after"]
    assert report["embeddings"] == EMBEDDED


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer that no hub is asked for: that of the tiny model."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    subprocess.run([sys.executable, "-m", "workers.vllm.tiny_model", folder], cwd=environments.ROOT, check=True)
    return folder


async def test_guidellm_with_its_default_validation(run, emulated, tokenizer, tmp_path):
    program = environments.python_of("guidellm").with_name("guidellm")
    report = tmp_path / "report.json"
    await run(
        program, "run",
        "--backend", json.dumps({"kind": "openai_http", "target": emulated.url, "model": "m", "api_key": emulated.secret}),
        "--profile", "kind=constant,rate=5",
        "--constraint", "kind=max_requests,count=10",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={report}",
        "--disable-console",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    (measured,) = json.loads(report.read_text())["benchmarks"]
    counts = measured["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (10, 0)
    assert len([row for row in await emulated.rows() if row.outcome == "done"]) == 10


@pytest.mark.nightly
async def test_vllm_bench_serve(run, emulated, tokenizer, tmp_path):
    python = os.environ.get("VLLM_PYTHON") or environments.ROOT / ".venv-vllm/bin/python"
    await run(
        python, environments.ROOT / "workers/vllm/command_line.py", "bench", "serve",
        "--backend", "openai-chat", "--base-url", emulated.url, "--endpoint", "/v1/chat/completions",
        "--model", "m", "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "32",
        "--random-output-len", "8", "--num-prompts", "8", "--request-rate", "10",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "bench.json",
        OPENAI_API_KEY=emulated.secret, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert (measured["completed"], measured["failed"], measured["total_output_tokens"]) == (8, 0, 64)


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.nightly
async def test_lm_eval(run, emulated, tokenizer, tmp_path):
    questions = tmp_path / "questions.json"
    questions.write_text("\n".join(json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(6)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK % questions)
    program = environments.python_of("lm-eval").with_name("lm_eval")
    await run(
        program, "run", "--model", "local-chat-completions", "--apply_chat_template", "--tasks", "tiny",
        "--model_args", f"model=m,base_url={emulated.url}/v1/chat/completions,num_concurrent=3,tokenizer={tokenizer}",
        "--include_path", tmp_path / "tasks", "--output_path", tmp_path / "results",
        OPENAI_API_KEY=emulated.secret, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    (results,) = (tmp_path / "results").rglob("*.json")
    assert "exact_match,none" in json.loads(results.read_text())["results"]["tiny"]
    assert [row.outcome for row in await emulated.rows()] == ["done"] * 6


@pytest.mark.nightly
async def test_aiperf(run, emulated, tokenizer, tmp_path):
    program = environments.python_of("aiperf").with_name("aiperf")
    (tmp_path / "tiny").symlink_to(tokenizer)  # it takes a longer path for the name of a repository
    await run(
        program, "profile", "--model", "m", "--url", emulated.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", "tiny", "--request-count", "8", "--concurrency", "2", "--isl", "32", "--osl", "8",
        "--api-key", emulated.secret, "--output-artifact-dir", tmp_path / "artifacts", "--ui", "none",
    )  # fmt: skip
    (report,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == 8


async def test_agents_of_langgraph_are_runs_with_units(run, emulated):
    """Nothing of the agents is ours: one is recognized by its conversation, two are marked by `metadata`."""
    printed = await run(environments.python_of("langchain"), CALLS / "langgraph_agents.py")
    report = json.loads(printed.splitlines()[-1])
    rows = await emulated.rows()
    assert {row.outcome for row in rows} == {"done"}
    await database_sync_to_async(follow_runs)(timezone.now())

    def read():
        runs = ApplicationRun.objects.select_related("application")
        return {run.application.name: (run.run, run.calls, run.deadline_s, run.application.recognized) for run in runs}

    runs = await database_sync_to_async(read)()
    assert len(runs) == 2
    marked = [row for row in rows if row.application == "report"]
    assert runs.pop("report") == ("run-1", len(marked), 120.0, False)
    assert {row.unit for row in marked} == {"plan", "write"}
    ((name, (recognized, calls, _, by_prompt)),) = runs.items()
    assert (by_prompt, name[0], recognized[0]) == (True, "~", "~")
    assert calls == len(rows) - len(marked) == report["unmarked"].count("ai")
    units = [row.unit for row in rows if row.run == recognized]
    assert set(units) <= {"after-user", "after-tool"}
    assert "after-user" in units
