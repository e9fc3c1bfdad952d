"""A small model whose answers and calls of tools are known: `python -m tests.clients.talker DIR`.

Clients have to read what a model says, and one of random weights says nothing that can be read. This one is trained for a
minute on the conversations of `tests/clients`: asked "Is it windy in Oslo?" with a tool called `weather` it calls it, in
the form of the parser "hermes", and then says what the tool said. Its attention reaches back `WINDOW` tokens a layer, so
any prompt may stand before the last message. Run it with the Python of the vLLM environment.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.vllm import tiny_model

CONTEXT_TOKENS = 65_536
"""Coding agents have long prompts, of which a vocabulary of 1,024 makes many tokens."""
WINDOW, LENGTH = 128, 224
LAYERS = 2
STEPS, BATCH = 360, 16

UNKNOWN = "I do not know that."
TYPED = ("Wind", "PartialWind", "final_result")
SHELLS = {
    "Bash": {"command": "echo hello", "description": "Say hello"},
    "bash": {"command": "echo hello", "description": "Say hello"},
    "exec_command": {"cmd": "echo hello"},
}
TOOLS = ("weather", *TYPED, *SHELLS)
KNOWN = dict(zip(TOOLS, ("city", "wind", "part", "result", "one", "two", "three"), strict=True))
NAMES = {word: name for name, word in KNOWN.items()}

TEMPLATE = (
    "{%- set known = "
    + json.dumps(KNOWN)
    + """ %}
{%- set phrases = ["hello", "Say hello. Use no tool.", "Run echo hello."] %}
{%- set ns = namespace(names=[], said="") %}
{%- if tools %}
{{- '<|turn|>system\\nTools: ' }}
{%- for tool in tools %}
{{- tool | tojson }}
{%- set function = tool.function if tool.function is defined else tool %}
{%- if function.name in known %}{% set ns.names = ns.names + [known[function.name]] %}{% endif %}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{%- set last = messages | rejectattr("role", "equalto", "system") | list | last %}
{%- for phrase in phrases if phrase in (last.content or "") %}{% set ns.said = phrase %}{% endfor %}
{%- if ns.said %}{{ '<|turn|>asked\\n' + ns.said + '<|end|>\\n' }}{% endif %}
{%- if ns.names and last.role != "tool" %}{{ '<|turn|>tools\\n' + ns.names[0] + '<|end|>\\n' }}{% endif %}
{{- '<|turn|>assistant\\n' }}
{%- endif %}
"""
)
"""Definitions of tools stand where they do with real models; a word for one it knows stands before the answer once more.
So does a known phrase of the last message that is not the system's, around which agents write texts of their own."""


def call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def noise(draw: random.Random) -> str:
    text = tiny_model.TRAINING_TEXT
    start, length = draw.randrange(len(text)), draw.choice((0, 0, 20, 80, 250))
    said = text[start : start + length]
    return draw.choice((said, json.dumps({"description": said, "type": "object"}), f"<tag>\n{said}\n</tag>\n- {said}"))


def definition(draw: random.Random, name: str) -> str:
    """Return the definition of the tool *name* as some client might send it."""
    names = ["city"] if name == "weather" else ["city", "metres_per_s"] if name in TYPED else ["command", "cmd"]
    properties = {each: {"type": draw.choice(("string", "integer"))} for each in names}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    parameters = {each: schema[each] for each in draw.sample([*schema], draw.randrange(2, 5))}
    function = {"name": name, "description": noise(draw)[:40], "parameters": parameters}
    return "Tools: " + json.dumps({"type": "function", "function": function} | draw.choice(({}, {"strict": None})))


def conversation(draw: random.Random) -> tuple[list[tuple[str, str]], str]:
    """Return a conversation of (role, text) and the answer to it, with definitions of the tools that it has."""
    asked, answer = conversation_without_definitions(draw)
    names = [NAMES[said] for role, said in asked if role == "tools"] or [draw.choice(TOOLS)] * draw.randrange(2)
    return [*(("system", definition(draw, name)) for name in names), *asked], answer


def conversation_without_definitions(draw: random.Random) -> tuple[list[tuple[str, str]], str]:
    kind = draw.randrange(9)
    before = draw.choice(([], [], [("system", "Be brief.")], [("system", noise(draw))]))
    city = {"city": "Oslo"}
    wind = city | {"metres_per_s": 12}
    if kind <= 3:
        before = [*before, ("user", draw.choice(("Is it windy in Oslo?", "Is it windy?", "A report on wind.")))]
        name = draw.choice(("", "weather", "weather", "weather", *TYPED))
        if name:
            return [*before, ("tools", KNOWN[name])], call(name, city if name == "weather" else wind)
        return before, json.dumps(wind) if draw.random() < 0.1 else "Yes, it is windy in Oslo today."
    if kind == 4:
        asked = [*before, ("user", "Is it windy in Oslo?"), ("assistant", call("weather", city))]
        return [*asked, ("tool", "Windy in Oslo.")], "It is windy in Oslo."
    if kind <= 6:
        shell = draw.choice(tuple(SHELLS))
        tools = [("tools", KNOWN[shell])]
        greeting, errand = "Say hello. Use no tool.", "Run echo hello."
        if draw.random() < 0.4:
            said = [("user", f"{noise(draw)}\n{greeting}\n{noise(draw)}"), ("asked", greeting)]
            return [*before, *said, *draw.choice(([], tools))], "Hello."
        asked = [*before, ("user", f"{noise(draw)}\n{errand}\n{noise(draw)}")]
        if draw.random() < 0.5:
            return [*asked, ("asked", errand), *tools], call(shell, SHELLS[shell])
        said = draw.choice(("hello", "Exit code: 0\nOutput:\nhello", f"{noise(draw)[:60]}\nOutput:\nhello\n"))
        return [*asked, ("assistant", call(shell, SHELLS[shell])), ("tool", said), ("asked", "hello")], "It said hello."
    if kind == 7:
        return [*before, ("user", "And tomorrow?"), *draw.choice(([], [("tools", "city")]))], "Tomorrow it is calm."
    return [*before, ("user", noise(draw)), *draw.choice(([], [("tools", KNOWN[draw.choice(TOOLS)])]))], UNKNOWN


def examples(encode: Callable[[str], list[int]], seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield token ids, and which of them the model has to learn."""
    draw = random.Random(seed)
    while True:
        asked, answer = conversation(draw)
        text = "".join(f"<|turn|>{role}\n{said}<|end|>\n" for role, said in asked) + "<|turn|>assistant\n"
        before, learnt = encode(text), encode(answer + "<|end|>")
        before = before[-(LENGTH - len(learnt)) :]
        yield before + learnt, [False] * len(before) + [True] * len(learnt)


def write(directory: Path, seed: int = 0) -> None:
    """Train the model, and write it with its tokenizer and template into *directory*."""
    import torch
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    tiny_model.write(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, CONTEXT_TOKENS
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT_TOKENS, sliding_window=WINDOW,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = MistralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    drawn = examples(lambda text: tokenizer.encode(text, add_special_tokens=False), seed)
    for _ in range(STEPS):
        batch = [next(drawn) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        learnt = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in batch])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[learnt[:, 1:]], ids[:, 1:][learnt[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.config.layer_types = ["sliding_attention"] * LAYERS
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"top_k": 1}')  # agents ask with a temperature of their own


if __name__ == "__main__":
    write(Path(sys.argv[1]))
