"""Terms that pages explain are those of the glossary, in its words."""

import re
from pathlib import Path

import pytest

from controlplane.console.glossary import TERMS, explained

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


def meanings() -> dict[str, str]:
    """The glossary's meanings by term, without the paper that a meaning is from."""
    rows = [line.split(" | ") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return {
        term.strip(): re.sub(r" \([A-Z]\w+\)$", "", meaning)
        for terms, meaning, *_ in rows
        for term in terms.strip("| ").split(", ")
    }


def test_pages_explain_terms_in_the_words_of_the_glossary():
    known = meanings()
    assert {term: known.get(term) for term in TERMS} == TERMS


@pytest.mark.parametrize(
    ("label", "begin"),
    [
        ("TTFT p95", "TTFT: time to"),
        ("Forecast load", "Forecast load: the highest"),
        ("Virtual queues", "Virtual queue: the ordered"),
        ("Donated to the spot pool", "Donated: of an instance"),
        ("Prompt tok", ""),
        ("LT-UA", "LT-UA: Towards the hourly plan by use"),
        ("SageServe LT-UA", "SageServe LT-UA: Requests go to"),
        ("WFQ", "WFQ: Tenants by the service time"),
        ("EV", "EV: Equation Verification"),
        ("Application", ""),
    ],
)
def test_a_label_is_explained_by_its_longest_term(label, begin):
    assert explained(label).startswith(begin)
    assert bool(explained(label)) == bool(begin)
