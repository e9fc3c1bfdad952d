"""Workload suite: the ten applications of Hermes figure 1, as generators of runs.

Structures are the paper's, and those of the programs that it names (FacTool, ReAct, AutoGen, HuggingGPT, Graph of Thoughts,
LangChain). Lengths are in tokens, as median and 95th percentile:

- CG: phases of ChatDev's published logs (70 runs), but for `SCRIPTS`. ALFWI: calls, growth of the prompt and outputs of
  tau-bench's airline trajectories of GPT-4o (200). LLMR: totals of Tree of Thoughts on the game of 24 with GPT-4 (100). DM:
  documents of Graph of Thoughts' merge tasks (100), with outputs of about 1,000 tokens for a merge (Hermes section 2.3).
- KBQAV: queries of 10 to 50 tokens (Hermes section 2.3). Other lengths, of EV, FEV, CC, KBQAV, PE and MRS, and all
  durations, are our choice, within the sizes of the paper: small ones take less than a minute of service, medium ones one to
  ten, large ones about ten or more.

Demands of a run are correlated: a long input makes claims, programs and documents long, and prompts contain what units
before them wrote.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from scheduling.applications.demand_graph import Backend, BackendKind, RunRecord, Step

Size = Literal["small", "medium", "large", "other"]
Z_95: Final = 1.6449
"""95th percentile of the standard normal distribution."""
MIX: Final[Mapping[Size, float]] = {"small": 0.72, "medium": 0.26, "large": 0.02, "other": 0.0}
"""Share of runs by size (Hermes section 5.1), divided evenly among the applications of a size."""


SCRIPTS: Final = 0.17
"""Share of Code Generation's runs whose first program passes: 16 % end within nine seconds (Hermes figure 7), where ChatDev
reviews each."""


class RunDraft:
    """A run while it is drawn: steps are added in the order in which they begin."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.steps: list[Step] = []

    def tokens(self, median: float, p95: float, scale: float = 1.0) -> float:
        """Draw a lognormal length, times *scale*."""
        return scale * median * math.exp(math.log(p95 / median) / Z_95 * self.random.standard_normal())

    def scale(self, sigma: float) -> float:
        """Draw a factor that lengths of the run share, 1 in the median."""
        return math.exp(sigma * self.random.standard_normal())

    def count(self, least: int, most: int) -> int:
        return int(self.random.integers(least, most + 1))

    def llm(self, unit: str, input_tokens: float, output_tokens: float, after: int = -1, parallel: int = 1) -> int:
        """Add a step of *parallel* LLM requests led to by the step *after*; return its number."""
        lengths = float(max(1, round(input_tokens))), float(max(1, round(output_tokens)))
        return self._add(Step(unit, after, *lengths, parallelism=parallel))

    def work(self, unit: str, least_s: float, most_s: float, after: int, parallel: int = 1) -> int:
        """Add a step of another backend, of a duration that is loguniform between the two."""
        duration_s = math.exp(self.random.uniform(math.log(least_s), math.log(most_s)))
        return self._add(Step(unit, after, duration_s=round(duration_s, 3), parallelism=parallel))

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class SuiteApplication:
    """An application of the suite."""

    title: str
    size: Size
    units: Mapping[str, BackendKind]
    draw: Callable[[RunDraft], None]
    prompts: Mapping[str, int]
    """Tokens of the system prompt of each LLM unit: the constant part of its input."""

    def run(self, random: np.random.Generator) -> RunRecord:
        """Draw a run."""
        draft = RunDraft(random)
        self.draw(draft)
        return RunRecord(tuple(draft.steps))

    def backends(self, model: str) -> dict[str, Backend]:
        """Return the backends of its units, with LLM units on *model*; each LLM unit has a system prompt."""
        return {
            unit: Backend(kind, model, prompt=f"{self.title}: {unit}") if kind == "llm" else Backend(kind, unit)
            for unit, kind in self.units.items()
        }


def _equation_verification(run: RunDraft) -> None:
    claims, scale = run.count(1, 6), run.scale(0.3)
    extract = run.llm("extract", 550 + run.tokens(250, 600, scale), 35 * claims * scale)
    write = run.llm("write-check", 450 + 35 * scale, run.tokens(60, 130, scale), extract, claims)
    run.work("execute", 0.3, 2.0, write, claims)


def _fact_verification(run: RunDraft) -> None:
    prompt, after, scale = 1_500 + run.tokens(30, 60), -1, run.scale(0.3)
    for _ in range(min(7, run.random.geometric(0.35))):
        thought = run.tokens(55, 120, scale)
        after = run.llm("think", prompt, thought, after)
        after = run.work("search", 0.3, 1.5, after)
        prompt += thought + run.tokens(80, 200)


def _code_checking(run: RunDraft) -> None:
    scale = run.scale(0.45)
    problem = run.tokens(150, 350, scale)
    tests = run.llm("write-tests", 400 + problem, run.tokens(110, 250, scale))
    solutions = run.llm("write-solutions", 350 + problem, run.tokens(180, 400, scale), tests, 3)
    run.work("execute", 1.0, 6.0, solutions, 3)


def _alfworld(run: RunDraft) -> None:
    prompt, after = run.tokens(1_560, 1_580), -1
    for _ in range(min(40, max(3, round(run.tokens(11, 23))))):
        action = run.tokens(53, 164)
        after = run.llm("act", prompt, action, after)
        after = run.work("environment", 0.05, 0.3, after)
        prompt += run.tokens(130, 320)


def _code_generation(run: RunDraft) -> None:
    if run.random.random() < SCRIPTS:
        run.work("execute", 1.0, 4.0, run.llm("write-code", run.tokens(600, 700), run.tokens(250, 450)))
        return
    scale, code = run.scale(0.2), run.tokens(765, 1_394)
    requirement = run.tokens(645, 1_000)
    after = run.llm("write-code", requirement, code)
    for _ in range(int(run.random.choice((1, 3, 5, 10, 20), p=(0.04, 0.7, 0.11, 0.08, 0.07)))):
        comment = run.tokens(170, 480, scale)
        after = run.llm("review", 570 + code, comment, after)
        code = min(2_000.0, code * run.tokens(0.98, 1.25))
        after = run.llm("revise", 700 + code + comment, code, after)
        after = run.work("execute", 1.0, 15.0, after)


def _knowledge_verification(run: RunDraft) -> None:
    claims, scale = run.count(3, 8), run.scale(0.3)
    extract = run.llm("extract-claims", 550 + run.tokens(200, 450, scale), 30 * claims * scale)
    queries = run.llm(
        "generate-queries", 350 + 30 * scale, min(50.0, max(10.0, run.tokens(25, 45, scale))), extract, claims
    )
    search = run.work("search", 0.5, 3.0, queries, claims)
    evidence = run.tokens(300, 800, scale)
    run.llm("verify-claim", 600 + evidence, 40 + 0.15 * evidence + run.tokens(40, 90), search, claims)


def _plan_and_execute(run: RunDraft) -> None:
    tasks, scale = run.count(2, 10), run.scale(0.4)
    question = run.tokens(60, 160, scale)
    plan = run.llm("plan", 2_300 + question, 70 * tasks + run.tokens(150, 300))
    choose = run.llm("choose-model", 1_300 + question, run.tokens(120, 220), plan, tasks)
    kind = run.random.random()
    if kind < 20 / 130:  # runs of HuggingGPT's examples that trigger text-to-video (Hermes section 2.2)
        after = run.work("text-to-video", 40.0, 120.0, choose)
    elif kind < 0.6:
        after = run.work("diffusion", 5.0, 30.0, choose, tasks // 2)
    else:
        after = run.work("vit", 0.5, 4.0, choose, tasks)
    run.llm("respond", 900 + question + 110 * tasks, run.tokens(550, 1_000, scale), after)


def _document_merging(run: RunDraft) -> None:
    documents, merged = run.tokens(1_400, 1_840), run.tokens(1_000, 1_400)
    merge = run.llm("merge", 300 + documents, merged, -1, 5)
    score = run.llm("score", 350 + documents + merged, run.tokens(120, 220), merge, 15)
    merged *= run.tokens(0.95, 1.1)
    aggregate = run.llm("aggregate", 350 + documents + merged, merged, score, 5)
    score = run.llm("score", 350 + documents + merged, run.tokens(120, 220), aggregate, 15)
    merged *= run.tokens(0.97, 1.1)
    improve = run.llm("improve", 300 + documents + merged, merged, score, 10)
    run.llm("score", 350 + documents + merged, run.tokens(120, 220), improve, 30)


def _map_reduce(run: RunDraft) -> None:
    pieces, scale = min(400, max(60, round(run.tokens(130, 260)))), run.scale(0.2)
    summary = run.tokens(210, 300, scale)
    after = run.llm("map", run.tokens(2_300, 2_500), summary, -1, pieces)
    while pieces > 10:
        pieces = math.ceil(pieces / 10)
        after = run.llm("reduce", 100 + 10 * summary, summary := run.tokens(300, 400, scale), after, pieces)
    run.llm("conclude", 100 + pieces * summary, run.tokens(400, 600, scale), after)


def _reasoning(run: RunDraft) -> None:
    after, beams, scale = -1, 1, run.scale(0.25)
    for candidates in (12, 33, 20, 17):
        after = run.llm("propose", 130, run.tokens(70, 100, scale), after, beams)
        judged = max(5, round(candidates * run.tokens(1.0, 1.3)))
        after = run.llm("judge", 133, run.tokens(50, 80, scale), after, judged)
        beams = 5


_LLM: Final[BackendKind] = "llm"
SUITE: Final[Mapping[str, SuiteApplication]] = {
    "EV": SuiteApplication(
        "Equation Verification",
        "small",
        {"extract": _LLM, "write-check": _LLM, "execute": "container"},
        _equation_verification,
        {"extract": 550, "write-check": 450},
    ),
    "FEV": SuiteApplication(
        "Fact Extraction and Verification",
        "small",
        {"think": _LLM, "search": "tool"},
        _fact_verification,
        {"think": 1500},
    ),
    "CC": SuiteApplication(
        "Code Checking",
        "small",
        {"write-tests": _LLM, "write-solutions": _LLM, "execute": "container"},
        _code_checking,
        {"write-tests": 400, "write-solutions": 350},
    ),
    "ALFWI": SuiteApplication(
        "ALFWorld Interaction", "small", {"act": _LLM, "environment": "tool"}, _alfworld, {"act": 1500}
    ),
    "KBQAV": SuiteApplication(
        "Knowledge-Based-Query-Answering Verification",
        "small",
        {"extract-claims": _LLM, "generate-queries": _LLM, "search": "tool", "verify-claim": _LLM},
        _knowledge_verification,
        {"extract-claims": 550, "generate-queries": 350, "verify-claim": 600},
    ),
    "CG": SuiteApplication(
        "Code Generation",
        "medium",
        {"write-code": _LLM, "review": _LLM, "revise": _LLM, "execute": "container"},
        _code_generation,
        {"write-code": 500, "review": 570, "revise": 700},
    ),
    "PE": SuiteApplication(
        "Plan-and-Execution",
        "medium",
        {"plan": _LLM, "choose-model": _LLM, "vit": "dnn", "diffusion": "dnn", "text-to-video": "dnn", "respond": _LLM},
        _plan_and_execute,
        {"plan": 2300, "choose-model": 1300, "respond": 900},
    ),
    "DM": SuiteApplication(
        "Document Merging",
        "large",
        {"merge": _LLM, "score": _LLM, "aggregate": _LLM, "improve": _LLM},
        _document_merging,
        {"merge": 300, "score": 350, "aggregate": 350, "improve": 300},
    ),
    "MRS": SuiteApplication(
        "MapReduce Summarization",
        "large",
        {"map": _LLM, "reduce": _LLM, "conclude": _LLM},
        _map_reduce,
        {"map": 100, "reduce": 100, "conclude": 100},
    ),
    "LLMR": SuiteApplication(
        "LLM Reasoning", "other", {"propose": _LLM, "judge": _LLM}, _reasoning, {"propose": 130, "judge": 133}
    ),
}
"""By the paper's abbreviation."""


def mixed(count: int, random: np.random.Generator, names: Sequence[str] = tuple(SUITE)) -> list[str]:
    """Draw the names of *count* runs by `MIX`, in random order: shares are kept as far as whole runs allow.

    Raises ValueError if none of *names* has a share.
    """
    sizes = [SUITE[name].size for name in names]
    shares = np.array([MIX[size] / sizes.count(size) for size in sizes])
    if not shares.sum() > 0:
        raise ValueError(f"none of {', '.join(names)} has a share of the mix")
    wanted = count * shares / shares.sum()
    runs = np.floor(wanted).astype(int)
    left = wanted - runs
    if (missing := count - int(runs.sum())) > 0:  # the rest by lot, in proportion
        runs[random.choice(len(names), missing, replace=False, p=left / left.sum())] += 1
    drawn = np.repeat(np.array(names), runs)
    return [str(name) for name in random.permutation(drawn)]
