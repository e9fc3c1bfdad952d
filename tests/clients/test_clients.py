"""Clients that tenants have: SDKs, agents, command lines and load generators, each unchanged, against a gateway.

`environments.CLIENTS` lists them. What a client reports of the gateway equals what it reports of the instance alone; the
instance is the emulator, which `tests/vllm` holds to real vLLM, or with `VLLM=1` a real vLLM, whose model `talker` trains.
"""

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
from tests.clients.conftest import ADDRESSED, CALLS, GATEWAY, REAL, address_of

pytestmark = pytest.mark.clients

ERRORS = {
    "model": ["NotFoundError", 404, "model_not_found"],
    "value": ["BadRequestError", 400, 400],
    "key": ["AuthenticationError", 401, "invalid_api_key"],
    "embeddings": ["NotFoundError", 404, "unsupported_endpoint"],
}
NO_NUMBER = {"value": ["BadRequestError", 400, "400"]}

MODELS = ["e", "m"] if REAL else ["e", "m", "w"]
EMBEDDED = [3, 384 if REAL else 32, True, False]
"""Vectors of three texts, their length, whether equal texts have equal vectors, and whether different ones do."""


CITY = {"city": "Oslo"}
"""Arguments of the tool of every script."""


def check_arguments(given):
    """Check that *given* are the arguments that a model gave: an emulated one draws them."""
    given = json.loads(given) if isinstance(given, str) else given
    assert set(given) == set(CITY)
    assert given == CITY or not REAL


def check_wind(typed):
    assert set(typed) == {"city", "metres_per_s"}
    assert typed == CITY | {"metres_per_s": 12} or not REAL


def check(report, errors):
    assert report["chat"] == report["stream"] != ""
    assert 0 < report["usage"] <= 8
    assert report["tool"] == "weather"
    check_arguments(report["arguments"])
    assert report["errors"] == errors


def check_batches(report):
    counts = {"total": 3, "completed": 3, "failed": 0}
    assert report["batch"] == {"status": "completed", "counts": counts, "answered": ["a", "b", "c"]}
    assert report["cancelled"] == "cancelled"
    assert report["listed"] == [2, 2]
    assert report["deleted"]


async def test_openai_for_python(said, served):
    report = await said("openai_python.py", "openai")
    check(report, ERRORS | NO_NUMBER)  # its SDK makes a text of a number
    assert report["models"] == MODELS
    assert report["embeddings"] == EMBEDDED
    assert report["response"]
    assert report["events"][0] == "response.created"
    assert report["events"][-1] == "response.completed"
    rows = await served.rows()
    outcomes = [row.outcome for row in rows if row.slo_class != "flexible"]
    assert outcomes == [*["done"] * 6, "failed"]  # the wrong value, which the instance judges
    check_batches(report)


async def test_openai_for_node(said):
    report = await said("openai_node.mjs", "node")
    check(report, ERRORS)
    assert report["models"] == MODELS
    assert report["embeddings"] == EMBEDDED
    assert report["response"]
    assert report["events"][-1] == "response.completed"
    check_batches(report)
    assert report["cut"]  # half a surrogate pair, as JSON.stringify writes it


def check_messages(report):
    assert report["message"]
    assert (report["type"], report["by_token"], report["tool"]) == ("message", "assistant", "weather")
    check_arguments(report["arguments"])
    assert report["stream"]
    assert report["usage"] <= 8
    assert report["tokens"] > 5
    errors = ERRORS | NO_NUMBER  # Anthropic's errors have no code: the instance gives none
    assert report["errors"] == {name: errors[name] for name in ("model", "value", "key")}


async def test_anthropic_for_python(said, served):
    check_messages(await said("anthropic_calls.py", "anthropic"))
    assert {row.surface for row in await served.rows()} == {"messages", "messages/count_tokens"}


async def test_anthropic_for_node(said):
    check_messages(await said("anthropic_node.mjs", "node"))


@pytest.mark.parametrize("environment", ["openai", "anthropic"])
async def test_no_sdk_sends_a_call_again_that_is_beyond_the_limit_of_its_run(run, environment):
    said = await run(environments.python_of(environment), CALLS / "run_limit.py", at=GATEWAY)
    assert json.loads(said.splitlines()[-1]) == ["RateLimitError", "run_limit_reached", "0"]


async def test_litellm(said):
    check(
        await said("litellm_calls.py", "litellm"),
        {name: error[:2] for name, error in ERRORS.items() if name != "embeddings"},
    )


async def test_langchain(said):
    report = await said("langchain_calls.py", "langchain")
    check(report, {name: ERRORS[name][:2] for name in ("model", "key")})
    assert report["after"]
    assert report["embeddings"] == EMBEDDED


WRONG = {name: ERRORS[name][:2] for name in ("model", "key")}


async def test_llama_index(said):
    report = await said("llama_index_calls.py", "llama-index")
    assert report["chat"] == report["stream"] != ""
    assert report["complete"]
    assert report["tool"] == "weather"
    check_arguments(report["arguments"])
    assert report["errors"] == WRONG


async def test_pydantic_ai(said, served):
    report = await said("pydantic_ai_calls.py", "pydantic-ai")
    for name in ("chat", "responses"):
        assert report[name]["said"]
        assert report[name]["stream"]
        assert report[name]["parts"][0] == "user-prompt"
        check_wind(report[name]["typed"])
    assert report["errors"] == {"model": ["ModelNotFoundError", 404], "key": ["ModelAuthenticationError", 401]}
    assert {row.surface for row in await served.rows()} == {"chat/completions", "responses"}


async def test_openai_agents(said, served):
    report = await said("openai_agents_calls.py", "openai-agents")
    for name in ("chat", "responses"):
        assert report[name]["said"] == report[name]["streamed"] != ""
        assert report[name]["items"][-1] == "message_output_item"
        assert "raw_response_event" in report[name]["events"]
    assert report["errors"] == WRONG
    assert {row.surface for row in await served.rows()} == {"chat/completions", "responses"}


async def test_instructor(said):
    report = await said("instructor_calls.py", "instructor")
    assert report.pop("errors") == WRONG
    assert set(report) == {"tool_call", "json_schema_mode", "partial"}
    for answer in report.values():
        check_wind(answer)


async def test_vercel_ai(said):
    """C66."""
    report = await said("vercel_ai_node.mjs", "node")
    assert report.pop("errors") == {"model": ["APICallError", 404], "key": ["APICallError", 401]}
    assert set(report) == {"responses", "chat", "compatible"}
    for answer in report.values():
        assert answer["text"]
        assert 0 < answer["usage"] <= 8
        ((name, given),) = answer["calls"]
        assert name == "weather"
        check_arguments(given)
        check_arguments(answer["object"])
        assert {"tool-input-start", "tool-input-delta", "tool-call", "finish"} <= set(answer["parts"])


MODEL_OF_LLM = """
- model_id: ours
  model_name: m
  api_base: %s
  api_key_name: ours
  supports_tools: true
  supports_schema: true
"""
WEATHER = "def weather(city: str) -> str:\n    'The weather in a city.'\n    return f'Windy in {city}.'"


async def test_llm(run, served, tmp_path):
    program = environments.python_of("llm").with_name("llm")
    printed = {}
    for at in ADDRESSED:
        (tmp_path / at).mkdir()
        (tmp_path / at / "extra-openai-models.yaml").write_text(MODEL_OF_LLM % f"{address_of(served, at)}/v1")

        async def ask(*options, at=at):
            asked = (program, "prompt", "-m", "ours", "--key", served.secret, "--no-log", "-o", "temperature", "0")
            return await run(*asked, *options, "Is it windy in Oslo?", at=at, LLM_USER_PATH=str(tmp_path / at))

        short = ("-o", "max_tokens", "8")
        printed[at] = [await ask(*short), await ask("--no-stream", *short), await ask("--functions", WEATHER, "--td")]
        printed[at].append(await ask("--schema", "city, metres_per_s int"))
    streamed, whole, after_tools, typed = printed[GATEWAY]
    assert streamed == whole != ""
    assert after_tools
    check_wind(json.loads(typed))
    assert printed[GATEWAY] == printed[ADDRESSED[0]]


NOWHERE = "http://127.0.0.1:9"
GREETING = "Say hello. Use no tool."
REQUESTS = pytest.mark.parametrize(
    ("asked", "last"),
    [
        (GREETING, "Hello."),
        pytest.param(
            "Run echo hello.", "It said hello.", marks=pytest.mark.skipif(not REAL, reason="what runs is drawn")
        ),
    ],
)
"""What an agent is asked for, and what it says last; the second needs its tool that runs commands."""


def lines_of(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@REQUESTS
async def test_claude_code(run, served, tmp_path, asked, last):
    """C11. An agent asks with a temperature of its own, so emulated words differ each time; what it sends does not."""
    sent = {}
    for at in ADDRESSED:
        printed = await run(
            environments.program_of("agents", "claude"), "-p", asked, "--output-format", "stream-json", "--verbose",
            "--max-turns", "4", "--allowedTools", "Bash(echo:*)", at=at, **alone_in(empty_folder(tmp_path)),
            ANTHROPIC_BASE_URL=address_of(served, at), ANTHROPIC_AUTH_TOKEN=served.secret, ANTHROPIC_MODEL="m",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )  # fmt: skip
        said = lines_of(printed)
        answer, result = next(one["message"] for one in said if one["type"] == "assistant"), said[-1]
        assert (result["subtype"], result["is_error"]) == ("success", False)
        assert result["result"]
        assert result["result"] == last or not REAL
        sent[at] = answer["usage"]["input_tokens"]
    assert sent[GATEWAY] == sent[ADDRESSED[0]] > 1000
    rows = await served.rows()
    assert {(row.surface, row.outcome, row.streamed) for row in rows} == {("messages", "done", True)}
    assert rows[0].prompt_tokens == sent[GATEWAY]


MODEL_OF_CODEX = """
model = "m"
model_provider = "ours"
[model_providers.ours]
name = "ours"
base_url = "%s/v1"
wire_api = "responses"
env_key = "KEY"
"""


@REQUESTS
async def test_codex(run, served, tmp_path, asked, last):
    """C23. Containers have no place for its sandbox; commands that an emulated model draws stay in it."""
    unbound = ["--dangerously-bypass-approvals-and-sandbox"] if REAL else []
    for at in ADDRESSED:
        folder = empty_folder(tmp_path)
        (folder / ".codex").mkdir()
        (folder / ".codex" / "config.toml").write_text(MODEL_OF_CODEX % address_of(served, at))
        printed = await run(
            environments.program_of("agents", "codex"), "exec", "--skip-git-repo-check", "--json",
            *unbound, asked, at=at, **alone_in(folder),
        )  # fmt: skip
        said = lines_of(printed)
        assert said[-1]["type"] == "turn.completed", said
        assert said[-1]["usage"]["input_tokens"] > 1000
        words = [one["item"]["text"] for one in said if one.get("item", {}).get("type") == "agent_message"]
        assert words
        assert words[-1] == last or not REAL
    rows = await served.rows()
    assert {(row.surface, row.outcome, row.streamed) for row in rows} == {("responses", "done", True)}


MODEL_OF_OPENCODE = {"name": "m", "limit": {"context": 30_000, "output": 1_000}}


@REQUESTS
async def test_opencode(run, served, tmp_path, asked, last):
    for at in ADDRESSED:
        folder = empty_folder(tmp_path)
        (folder / ".config/opencode").mkdir(parents=True)
        options = {"baseURL": f"{address_of(served, at)}/v1", "apiKey": served.secret}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "ours",
            "options": options,
            "models": {"m": MODEL_OF_OPENCODE},
        }
        settings = {"model": "ours/m", "small_model": "ours/m", "provider": {"ours": provider}}
        (folder / ".config/opencode/opencode.json").write_text(json.dumps(settings | {"autoupdate": False}))
        printed = await run(
            environments.program_of("agents", "opencode"), "run", "--format", "json", asked,
            at=at, **alone_in(folder), OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        )  # fmt: skip
        said = lines_of(printed)
        assert said[-1]["type"] == "step_finish", said
        assert "error" not in {one["type"] for one in said}
        assert [one["part"]["text"] for one in said if one["type"] == "text"][-1] == last or not REAL
    rows = await served.rows()
    assert {(row.surface, row.outcome, row.streamed) for row in rows} == {("chat/completions", "done", True)}


def alone_in(folder):
    """Return variables with which a program knows nothing but *folder*, and reaches no host but this one."""
    return {"HOME": str(folder), "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}


def empty_folder(within):
    """Return the same folder for each address: its name is part of the prompt, whose tokens are compared."""
    folder = within / "home"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


async def test_promptfoo(run, served, tmp_path):
    """It asks for a newer Node than many systems have, so its environment brings one."""
    answers = {}
    for at in ADDRESSED:
        config = {"apiBaseUrl": f"{address_of(served, at)}/v1", "apiKey": served.secret, "temperature": 0}
        said = [{"type": "javascript", "value": "output.length > 0"}]
        asked = {
            "prompts": ["Is it windy in {{city}}?"],
            "providers": [
                {"id": "openai:chat:m", "config": config | {"max_tokens": 8}},
                {"id": "openai:responses:m", "config": config | {"max_output_tokens": 8}},
            ],
            "tests": [{"vars": {"city": city}, "assert": said} for city in ("Oslo", "Lima")],
        }
        (tmp_path / f"{at}.json").write_text(json.dumps(asked))
        report = tmp_path / f"{at}-out.json"
        await run(
            environments.program_of("promptfoo", "node"), environments.program_of("promptfoo", "promptfoo"), "eval",
            "-c", tmp_path / f"{at}.json", "--no-cache", "--no-progress-bar", "--no-table", "-o", report,
            at=at, **alone_in(empty_folder(tmp_path)), PROMPTFOO_DISABLE_TELEMETRY="1",
            PROMPTFOO_DISABLE_UPDATE="1", PROMPTFOO_DISABLE_REMOTE_GENERATION="1",
        )  # fmt: skip
        results = json.loads(report.read_text())["results"]
        assert (results["stats"]["successes"], results["stats"]["failures"], results["stats"]["errors"]) == (4, 0, 0)
        answers[at] = sorted(one["response"]["output"] for one in results["results"])
    assert answers[GATEWAY] == answers[ADDRESSED[0]]
    assert [row.outcome for row in await served.rows()] == ["done"] * 4


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer that no hub is asked for: that of the tiny model."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    subprocess.run([sys.executable, "-m", "workers.vllm.tiny_model", folder], cwd=environments.ROOT, check=True)
    return folder


EACH = pytest.mark.parametrize("at", ADDRESSED)
"""A load generator does the same number of requests and tokens at either address."""


@EACH
async def test_guidellm_with_its_default_validation(run, served, tokenizer, tmp_path, at):
    program = environments.python_of("guidellm").with_name("guidellm")
    report = tmp_path / "report.json"
    backend = {"kind": "openai_http", "target": address_of(served, at), "model": "m", "api_key": served.secret}
    await run(
        program, "run",
        "--backend", json.dumps(backend),
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
    assert len([row for row in await served.rows() if row.outcome == "done"]) == (10 if at == GATEWAY else 0)


@EACH
@pytest.mark.nightly
async def test_vllm_bench_serve(run, served, tokenizer, tmp_path, at):
    """E6: started by our shim, where `vllm` has no metadata of a package."""
    python = os.environ.get("VLLM_PYTHON") or environments.ROOT / ".venv-vllm/bin/python"
    await run(
        python, environments.ROOT / "workers/vllm/command_line.py", "bench", "serve",
        "--backend", "openai-chat", "--base-url", address_of(served, at), "--endpoint", "/v1/chat/completions",
        "--model", "m", "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "32",
        "--random-output-len", "8", "--num-prompts", "8", "--request-rate", "10",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "bench.json",
        OPENAI_API_KEY=served.secret, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
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
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.nightly
async def test_lm_eval(run, served, tokenizer, tmp_path):
    questions = tmp_path / "questions.json"
    questions.write_text("\n".join(json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(6)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK % questions)
    program = environments.python_of("lm-eval").with_name("lm_eval")
    answers = {}
    for at in ADDRESSED:
        url = f"{address_of(served, at)}/v1/chat/completions"
        await run(
            program, "run", "--model", "local-chat-completions", "--apply_chat_template", "--tasks", "tiny",
            "--model_args", f"model=m,base_url={url},num_concurrent=3,tokenizer={tokenizer}", "--log_samples",
            "--include_path", tmp_path / "tasks", "--output_path", tmp_path / at,
            OPENAI_API_KEY=served.secret, HF_HUB_OFFLINE="1",
        )  # fmt: skip
        (results,) = (tmp_path / at).rglob("results*.json")
        assert "exact_match,none" in json.loads(results.read_text())["results"]["tiny"]
        (samples,) = (tmp_path / at).rglob("samples*.jsonl")
        answers[at] = sorted(str(json.loads(line)["resps"]) for line in samples.read_text().splitlines())
    assert answers[GATEWAY] == answers[ADDRESSED[0]]
    assert [row.outcome for row in await served.rows()] == ["done"] * 6


@EACH
@pytest.mark.nightly
async def test_aiperf(run, served, tokenizer, tmp_path, at):
    program = environments.python_of("aiperf").with_name("aiperf")
    (tmp_path / "tiny").symlink_to(tokenizer)  # it takes a longer path for the name of a repository
    await run(
        program, "profile", "--model", "m", "--url", address_of(served, at), "--endpoint-type", "chat", "--streaming",
        "--tokenizer", "tiny", "--request-count", "8", "--concurrency", "2", "--isl", "32", "--osl", "8",
        "--api-key", served.secret, "--output-artifact-dir", tmp_path / "artifacts", "--ui", "none",
    )  # fmt: skip
    (report,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == 8


async def test_agents_of_langgraph_are_runs_with_units(run, served):
    """Nothing of the agents is ours: two are marked by `metadata`, and what nothing marks is no run."""
    printed = await run(environments.python_of("langchain"), CALLS / "langgraph_agents.py")
    report = json.loads(printed.splitlines()[-1])
    rows = await served.rows()
    assert {row.outcome for row in rows} == {"done"}
    await database_sync_to_async(follow_runs)(timezone.now())

    def read():
        runs = ApplicationRun.objects.select_related("application")
        return {run.application.name: (run.run, run.calls, run.deadline_s) for run in runs}

    marked = [row for row in rows if row.application == "report"]
    assert await database_sync_to_async(read)() == {"report": ("run-1", len(marked), 120.0)}
    assert {row.unit for row in marked} == {"plan", "write"}
    assert len(rows) - len(marked) == report["unmarked"].count("ai")
