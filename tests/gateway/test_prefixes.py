"""Hashes of prompt prefixes: equality, difference, and the bound on a prompt's cost."""

import json
import os
import subprocess
import sys

import orjson
import pytest

from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.serving.prefixes import BLOCK_CHARACTERS, BLOCK_IDS, LONGEST, leading_hashes
from scheduling.routing.prefix_affinity import MOST_NOTED

SYSTEM = "You are of great help. " * 100
BODIES = [
    {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Où est le café ? " * 50}]},
    {"prompt": SYSTEM},
    {"prompt": list(range(1000))},
]


def hashes(body, *, chat=True, model="m", prompt_tokens=1000):
    call = Call.read(orjson.dumps({"model": model} | body), Kind.CHAT if chat else Kind.COMPLETION, max_depth=20)
    return leading_hashes(call, prompt_tokens)[:2]


def common(one, other):
    return sum(1 for a, b in zip(one, other, strict=False) if a == b)


def chat(*texts, **more):
    roles = ["system", "user", "assistant"]
    messages = [{"role": roles[at % 3], "content": text} for at, text in enumerate(texts)]
    return {"messages": messages} | more


def test_prompts_that_begin_alike_share_hashes_as_far_as_they_do():
    one, _ = hashes(chat(SYSTEM, "What is a ship? " * 90))
    other, _ = hashes(chat(SYSTEM, "Why do ships float? " * 90))
    alike = len(SYSTEM) // BLOCK_CHARACTERS
    assert alike <= common(one, other) <= alike + 1
    assert one[: common(one, other)] == other[: common(one, other)], "once they differ, they differ to the end"
    assert hashes(chat(SYSTEM, "What is a ship? " * 90))[0] == one


def test_a_longer_conversation_extends_the_shorter_one():
    short, _ = hashes(chat(SYSTEM, "Hello. " * 100))
    long, _ = hashes(chat(SYSTEM, "Hello. " * 100, "Good day! " * 100, "And now? " * 100))
    assert long[: len(short)] == short
    assert len(long) > len(short)


@pytest.mark.parametrize(
    "other",
    [
        chat("y" + SYSTEM[1:]),
        chat(SYSTEM, tools=[{"type": "function", "function": {"name": "f"}}]),
        {"messages": [{"role": "user", "content": SYSTEM}]},
    ],
)
def test_what_begins_differently_shares_nothing(other):
    assert common(hashes(chat(SYSTEM))[0], hashes(other)[0]) == 0


def test_models_share_nothing():
    assert common(hashes(chat(SYSTEM))[0], hashes(chat(SYSTEM), model="n")[0]) == 0


def test_text_in_parts_counts_as_text():
    parts = {"messages": [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}]}
    assert hashes(parts)[0] == hashes(chat(SYSTEM))[0]


def test_token_ids_are_cut_by_tokens():
    hashed, block_tokens = hashes({"prompt": list(range(3 * BLOCK_IDS + 5))}, chat=False)
    assert (len(hashed), block_tokens) == (3, BLOCK_IDS)
    assert hashes({"prompt": [list(range(3 * BLOCK_IDS)), [1]]}, chat=False)[0] == hashed


def test_a_block_of_text_has_its_part_of_the_tokens():
    text = "a" * 20 * BLOCK_CHARACTERS
    assert hashes({"prompt": text}, chat=False, prompt_tokens=1000)[1] == 50
    assert hashes({"prompt": [text, "b"]}, chat=False)[0] == hashes({"prompt": text}, chat=False)[0]


def test_a_short_prompt_has_no_block():
    assert hashes(chat("Hi"))[0] == []


def test_no_prompt_costs_more_than_the_bound():
    long = hashes({"prompt": "x" * (3 * LONGEST)}, chat=False)[0]
    assert len(long) == MOST_NOTED
    assert len(hashes(chat(*["word " * 50_000] * 3))[0]) == MOST_NOTED


def test_two_interpreters_agree():
    """Records with hashes cross processes, and Python's own `hash` differs in each."""
    program = (
        "import json; from controlplane.gateway.serving.prefixes import leading_hashes\n"
        "from tests.gateway.test_prefixes import BODIES, hashes\n"
        "print(json.dumps([hashes(body, chat='messages' in body)[0] for body in BODIES]))"
    )
    command = [sys.executable, "-c", program]
    other = os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    said = subprocess.run(command, capture_output=True, check=True, text=True, env=other).stdout
    assert json.loads(said) == [hashes(body, chat="messages" in body)[0] for body in BODIES]


def test_hashes_are_what_they_were_and_need_the_secret_key(settings):
    """Processes of two versions may run at once: change this only with a note of it."""
    settings.SECRET_KEY = "key"
    assert hashes({"prompt": "a" * BLOCK_CHARACTERS}, chat=False)[0] == [203995607798585]
    assert hashes({"prompt": [1] * BLOCK_IDS}, chat=False)[0] == [162603290210757]
    settings.SECRET_KEY = "other"
    assert hashes({"prompt": [1] * BLOCK_IDS}, chat=False)[0] != [162603290210757]


def test_the_largest_ids_and_half_a_character_have_a_hash():
    assert len(hashes({"prompt": [2**64 - 1] * BLOCK_IDS}, chat=False)[0]) == 1
    half = Call({"prompt": "\ud800" * BLOCK_CHARACTERS}, "m", False, False, 1, None, BLOCK_CHARACTERS, None, 0, False)
    assert len(leading_hashes(half, 9)[0]) == 1


def picture(data, question="What is this?"):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": question}]}]}


def test_images_differ_by_their_content():
    one = chat(SYSTEM) | {"messages": [*chat(SYSTEM)["messages"], *picture("a" * 9000, SYSTEM)["messages"]]}
    other = {"messages": [*chat(SYSTEM)["messages"], *picture("b" * 9000, SYSTEM)["messages"]]}
    alike = len(SYSTEM) // BLOCK_CHARACTERS
    assert alike <= common(hashes(one)[0], hashes(other)[0]) <= alike + 1
    assert hashes(one) == hashes(one)


def test_a_short_prompt_is_known_by_its_session():
    def of(session, body):
        call = Call.read(orjson.dumps({"model": "m"} | body), Kind.CHAT, max_depth=20)
        return leading_hashes(call, 900, session)[:2]

    one, tokens = of("s1", picture("a" * 9000))
    assert (len(one), tokens) == (1, 900)
    assert of("s1", picture("a" * 9000, "And this?"))[0] == one
    assert of("s2", picture("a" * 9000))[0] != one
    assert of("", picture("a" * 9000)) == ([], 256 * 900 // len("What is this?"))
    assert of("s1", chat(SYSTEM)) == hashes(chat(SYSTEM), prompt_tokens=900)  # its text says enough
