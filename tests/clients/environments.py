"""Clients that tenants have, and their environments, with nothing of ours: `python -m tests.clients.environments`.

The environments stand in `.venv-clients/`, made once for each list of packages; `make clients` makes those that are missing.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"


@dataclass(frozen=True)
class Client:
    """A program of the field: how it is pointed at a server, what it is tried with, and the test that tries it."""

    title: str
    packages: tuple[str, ...]
    environment: str
    """Folder in `.venv-clients/`; empty if it has none."""
    pointed: str
    tried: str
    test: str
    nightly: bool = False
    """It brings much, or takes long: `make clients ALL=1`."""


CLIENTS = (
    Client(
        "OpenAI SDK, Python", ("openai==3.57.0",), "openai", '`OpenAI(base_url="URL/v1", api_key="KEY")`',
        "models, chat, streams, tools, Responses, embeddings, files, batches, errors", "test_openai_for_python",
    ),
    Client(
        "OpenAI SDK, Node", ("openai@6.49.0",), "node", '`new OpenAI({ baseURL: "URL/v1", apiKey: "KEY" })`',
        "the same, and half a surrogate pair", "test_openai_for_node",
    ),
    Client(
        "Anthropic SDK, Python", ("anthropic==2.14.0",), "anthropic",
        '`Anthropic(base_url="URL", api_key="KEY")`, or `auth_token`',
        "messages, streams, tools, counted tokens, errors", "test_anthropic_for_python",
    ),
    Client(
        "Anthropic SDK, Node", ("@anthropic-ai/sdk@1.14.0",), "node", '`new Anthropic({ baseURL: "URL", apiKey: "KEY" })`',
        "the same", "test_anthropic_for_node",
    ),
    Client(
        "Claude Code", ("@anthropic-ai/claude-code@2.1.332",), "agents",
        "`ANTHROPIC_BASE_URL=URL`, `ANTHROPIC_AUTH_TOKEN=KEY`, `ANTHROPIC_MODEL=MODEL`",
        "`claude -p`; and the requests of a session: parts with `cache_control`, tools, thinking, results of tools, counted "
        "tokens", "test_claude_code",
    ),
    Client(
        "Codex", ("@openai/codex@0.171.0",), "agents",
        '`[model_providers.NAME]` with `base_url = "URL/v1"`, `wire_api = "responses"` and an `env_key`',
        "`codex exec`; and the requests of a session: Responses with function, custom, namespace and search tools, and "
        "their results", "test_codex",
    ),
    Client(
        "opencode", ("opencode-ai@1.18.33",), "agents",
        '`opencode.json`: a provider with `"npm": "@ai-sdk/openai-compatible"` and `"baseURL": "URL/v1"`',
        "`opencode run`: streamed chats with tools", "test_opencode",
    ),
    Client(
        "promptfoo", ("node@22.23.3", "promptfoo@0.123.1"), "promptfoo",
        "`openai:chat:MODEL` and `openai:responses:MODEL` with `apiBaseUrl: URL/v1`",
        "an evaluation with assertions, by chat and by Responses", "test_promptfoo",
    ),
    Client(
        "LiteLLM", ("litellm==1.110.2",), "litellm", '`completion(model="openai/MODEL", api_base="URL/v1", api_key="KEY")`',
        "chat, streams, tools, errors", "test_litellm",
    ),
    Client(
        "LangChain, LangGraph", ("langchain==1.5.2", "langchain-openai==1.7.4"), "langchain",
        '`ChatOpenAI(base_url="URL/v1", api_key="KEY")`, and `OpenAIEmbeddings` with `check_embedding_ctx_length=False`',
        "chat, streams, tools, embeddings, agents whose calls are units of a run", "test_langchain",
    ),
    Client(
        "LlamaIndex", ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"), "llama-index",
        '`OpenAILike(api_base="URL/v1", api_key="KEY", is_chat_model=True, is_function_calling_model=True)`',
        "chat, streams, tools", "test_llama_index",
    ),
    Client(
        "Pydantic AI", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic-ai",
        '`OpenAIProvider(base_url="URL/v1", api_key="KEY")`',
        "agents with tools, streams, typed output, by chat and by Responses", "test_pydantic_ai",
    ),
    Client(
        "OpenAI Agents SDK", ("openai-agents==0.24.0",), "openai-agents",
        '`OpenAIResponsesModel` or `OpenAIChatCompletionsModel` with `AsyncOpenAI(base_url="URL/v1", api_key="KEY")`',
        "agents with tools, streamed too, by chat and by Responses", "test_openai_agents",
    ),
    Client(
        "Instructor", ("instructor==1.17.0",), "instructor", '`from_openai(OpenAI(base_url="URL/v1", api_key="KEY"))`',
        "typed answers by tools and by JSON schema, partial ones from a stream", "test_instructor",
    ),
    Client(
        "Vercel AI SDK", ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"), "node",
        '`createOpenAI` or `createOpenAICompatible({ name, baseURL: "URL/v1", apiKey: "KEY", includeUsage: true })`',
        "`streamText` with tools and `generateObject`, by chat and by Responses", "test_vercel_ai",
    ),
    Client(
        "llm", ("llm==0.36",), "llm", "`extra-openai-models.yaml` with `api_base: URL/v1`, and `llm keys set`",
        "prompts, streamed and not, tools, schemas", "test_llm",
    ),
    Client(
        "GuideLLM", ("guidellm==0.8.1",), "guidellm", "`--backend kind=openai_http,target=URL,api_key=KEY`",
        "a run with its own validation", "test_guidellm_with_its_default_validation",
    ),
    Client(
        "vllm bench serve", (), "", "`--base-url URL`, `OPENAI_API_KEY=KEY`", "a run by chat", "test_vllm_bench_serve",
        nightly=True,
    ),
    Client(
        "lm-evaluation-harness", ("lm-eval[api]==0.4.13",), "lm-eval",
        "`--model local-chat-completions --model_args base_url=URL/v1/chat/completions`",
        "a task", "test_lm_eval", nightly=True,
    ),
    Client(
        "AIPerf", ("aiperf==0.13.0",), "aiperf", "`--url URL --api-key KEY --endpoint-type chat`", "a streamed run",
        "test_aiperf", nightly=True,
    ),
)  # fmt: skip


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def program_of(name: str, program: str) -> Path:
    """Return a *program* of the npm packages in the environment *name*."""
    return FOLDER / name / "node_modules" / ".bin" / program


def wanted(nightly: bool) -> dict[str, list[str]]:
    """Return the packages of each environment; with *nightly* of those too that bring much."""
    packages: dict[str, list[str]] = {}
    for client in CLIENTS:
        if client.packages and (nightly or not client.nightly):
            packages.setdefault(client.environment, []).extend(client.packages)
    return packages


def make(name: str, packages: list[str]) -> None:
    """Make the environment *name* unless it stands already with the same *packages*."""
    folder, noted = FOLDER / name, FOLDER / name / "packages"
    if noted.exists() and noted.read_text().split() == packages:
        return
    of_node = "==" not in packages[0]
    if of_node and not shutil.which("npm"):
        print(f"There is no npm: {name} is left out.")
        return
    print(f"Installing {' '.join(packages)} in {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if of_node:
        folder.mkdir(parents=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *packages], check=True
        )
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "-q", "--python", python_of(name)]
        subprocess.run(
            [*(install if uv.exists() else [python_of(name), "-m", "pip", "install", "-q"]), *packages], check=True
        )
    noted.write_text("\n".join(packages))


def main() -> None:
    for name, packages in wanted("all" in sys.argv[1:]).items():
        make(name, packages)


if __name__ == "__main__":
    main()
