"""The table of jobs in `docs/operate/console.md`: sixteen that a review of November 2026 timed, in clicks and hesitations.

`tests/e2e/test_operator_jobs.py` does each in Chromium and counts its clicks. `python -m tests.docs.jobs` writes the table
again after a change here; a test compares the two.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "console.md"
BEGIN, END = "<!-- table: python -m tests.docs.jobs -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True, slots=True)
class Job:
    """*then* are the clicks of the review, None where it was no matter of clicks; a form of Admin, which it left out, is one
    that opens it and one that saves it.
    """

    name: str
    title: str
    then: int | None
    clicks: int
    """From Overview, along links and buttons; fields that are filled in or chosen are none."""
    hesitations: dict[str, str]
    """What the review names, and what there is instead; empty where it is still so."""

    @property
    def most(self) -> int:
        """The clicks that are allowed."""
        return self.clicks if self.then is None else 2 * self.then // 3


JOBS = (
    Job("deploy", "Add a region, GPUs and a model", 4, 2, {
        "30 empty fields, the model second": "the model first, the rest folded",
        "no picker of sizes": "published models bring their sizes",
        "“Eu North”, and unsaid that nothing scales it": "“EU North”, and the form says what scales it",
    }),
    Job("slow", "Why was a request slow?", 2, 1, {
        "the lowest score had not won": "what pulled it from its queue is said",
    }),
    Job("spike", "A spike: what happened?", 3, 2, {
        "no marks on charts": "moves, deploys, failures and alerts are marked",
        "events are plans by the minute": "those are folded",
        "demand, moves and SLO are on no one picture": "Timeline has them, and what changed in the span",
    }),
    Job("usage", "GPU-hours and dollars of a day", 2, 1, {
        "7 days draw 24 h, no GPU type, tokens mixed": "the chart says from when, by GPU type, tile gone",
    }),
    Job("approve", "Approve a plan", 3, 2, {
        "no demand, SLO and use in the dialog": "all three, beside the forecast",
        "the card expires each minute": "a plan that repeats it is approved in its place",
    }),
    Job("what_if", "What if a region is lost at twice the demand?", 3, 2, {
        "the ready question is invalid": "it is filled in",
        "a region's row asks for node, instance and count": "they are not there",
        "the title names half of it": "it names both",
        "unknown time, then 47 minutes": "known before the run; ten minutes are simulated",
    }),
    Job("key", "A key with a budget", 5, 2, {
        "models by name and comma": "a list",
        "the budget afterwards, in Admin": "a field of the same form",
        "“Free”, Soft and Hard": "“Within its limits”, Warn at and Stop at",
    }),
    Job("maintenance", "A node into maintenance", 4, 2, {
        "no drain of a node": "maintenance cordons, drains and stops",
        "no end": "it ends by itself",
        "no notice": "on Overview, Fleet and the node's page",
    }),
    Job("batch", "A batch in time", None, 3, {
        "snippets before data": "folded in the dialog",
        "no upload": "a file and a key",
    }),
    Job("application", "The graph of an application and a run", 3, 2, {
        "rank, Gittins, refine, parallel": "priority, work left, at once",
        "the graph is worse than a mean": "the better of both predicts, and is named",
        "names mean nothing": "tenant and kinds of units beside them",
    }),
    Job("stop", "Stop a bad instance", 4, 2, {
        "the floor starts it again": "only an operator does",
    }),
    Job("roll_out", "Roll out a flag", None, 4, {
        "in Admin, and on another page afterwards": "one dialog of the model",
    }),
    Job("alert", "An alert with a webhook", 3, 2, {
        "the rule is in Admin": "in a dialog",
        "URL as password, Window, For": "Receivers, Judged over, Open after, each with help",
    }),
    Job("undo", "Undo a mistake", None, 3, {
        "events do not offer it": "Undo beside the event",
        "a key cannot be undone": "a new one can; a revoked one says so before",
        "cordon, deploy and queue each elsewhere": "all in Events",
    }),
    Job("rest", "REST docs and a service key", 4, 2, {
        "8 s until the docs are there": "they are served from here",
        "the tenant is refused": "the form of the docs has the right one",
        "a key without an end is refused": "90 days are filled in",
        "neither is written at the field": "both are",
    }),
    Job("users", "A user with a password and a role", 5, 3, {
        "two forms": "one",
        "where a role over the fleet comes from": "written at the field",
        "the link has the wrong port": "that of the stack",
    }),
)  # fmt: skip


def table() -> str:
    rows = ["| job | clicks then | now | hesitations then | now | named then: *now* |", "|---|---|---|---|---|---|"]
    for job in JOBS:
        now = list(job.hesitations.values())
        named = "; ".join(f"{was}: *{there or 'still'}*" for was, there in job.hesitations.items())
        numbers = f"{job.then or 'none'} | {job.clicks} | {len(now)} | {now.count('')}"
        rows.append(f"| {job.title} | {numbers} | {named} |")
    counted = [job for job in JOBS if job.then is not None]
    clicks = f"{sum(job.then or 0 for job in counted)} | {sum(job.clicks for job in counted)}"
    left = f"{sum(len(job.hesitations) for job in JOBS)} | {sum('' in job.hesitations.values() for job in JOBS)}"
    return "\n".join([*rows, f"| all with clicks then | {clicks} | {left} | |"]) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
