"""What vLLM's own protocol models take, field by field.

Run by vLLM's Python: reads `[[kind, body], …]` from its standard input and prints, for each, whether vLLM would serve it.
`tests/gateway/test_as_vllm_takes.py` holds the gateway to it, by what `tests/vllm/test_acceptance.py` has recorded.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDED = Path(__file__).with_name("acceptance.json")
CONTEXT_TOKENS = 8192

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
RESPONSE = {"model": "m", "input": "hi"}
BASES: dict[str, dict[str, Any]] = {"chat/completions": CHAT, "completions": TEXT, "responses": RESPONSE}
INTEGERS = [
    None,
    1,
    0,
    -1,
    2,
    100,
    100.0,
    1.5,
    "100",
    "100.0",
    " 7 ",
    "1e2",
    "ten",
    True,
    False,
    [1],
    {},
    1e30,
    3_000_000_000,
]
NUMBERS = [None, 0, 1, 0.7, "0.7", "1", "hot", -0.1, 2, 2.5, True, [], "nan"]
TRUTHS = [
    None,
    True,
    False,
    1,
    0,
    1.0,
    2,
    "true",
    "false",
    "True",
    "yes",
    "no",
    "on",
    "off",
    "1",
    "0",
    "t",
    "maybe",
    "",
    [],
    {},
]
OF_EVERY_KIND = {"temperature": NUMBERS, "top_p": NUMBERS, "priority": [*INTEGERS, 2**40, 2**63], "stream": TRUTHS}
LIMITS = {"max_tokens": INTEGERS, "min_tokens": INTEGERS, "n": [*INTEGERS, 200, 16_384, 16_385], "ignore_eos": TRUTHS}
LIMITS |= {"stop": [None, "x", ["x"], ["x", "y"], [1], 3, {}]}
FIELDS: dict[str, dict[str, list[Any]]] = {
    "chat/completions": OF_EVERY_KIND | LIMITS | {
        "max_completion_tokens": INTEGERS,
        "tools": [None, "x", {}, [{"type": "function", "function": {"name": "f"}}]],
        "messages": [
            None, "hi", {}, [1], [{"content": "hi"}], [{"role": "user", "content": 3}],
            [{"role": "user", "content": ["hi", "ho"]}],
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [{"role": "user", "content": [3]}],
            [{"role": "user"}], [{"role": "assistant", "content": None}], [{"role": "user", "content": []}],
            [{"role": "user", "content": [{"text": "hi"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
            [{"role": "critic", "content": "hi"}], [{"role": "user", "content": "hi", "name": "ann"}],
            [{"role": "developer", "content": "hi"}],
        ],
    },
    "completions": OF_EVERY_KIND | LIMITS | {
        "prompt": [
            None, "", "hi", [1, 2], [1.0, 2.0], ["1", "2"], [1, "2"], [[1], [2.0]], ["a", ""], ["a", "b"], [1, -4], [1, "a"],
            {"a": 1}, [[1], ["a"]], [True, 1], [1.5], 7,
        ],
        "echo": TRUTHS,
    },
    "responses": OF_EVERY_KIND | {
        "max_output_tokens": INTEGERS,
        "instructions": [None, "brief", "", 3, ["x"]],
        "input": [
            None, "", "hi", 3, [3], ["hi"], [{"role": "user", "content": "hi"}], [{"content": "hi"}],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            [{"role": "user", "content": ["x"]}],
        ],
    },
}  # fmt: skip
MORE: list[tuple[str, dict[str, Any]]] = [
    *(("chat/completions", {"stream": stream, "stream_options": options})
      for stream in (None, True, False, "true", "false", 1)
      for options in (None, {}, {"include_usage": True}, {"include_usage": "true"}, {"include_usage": "y"},
                      {"include_usage": "maybe"}, {"include_usage": None}, {"continuous_usage_stats": True}, "x", [])),
    ("completions", {"echo": True, "max_tokens": 0}), ("completions", {"echo": "true", "max_tokens": "0", "logprobs": 1}),
    ("completions", {"echo": False, "max_tokens": 0}), ("completions", {"prompt": None, "prompt_embeds": "AAAA"}),
    ("completions", {"prompt": None, "prompt_embeds": ["AAAA", "AAAA"]}),
    ("chat/completions", {"max_tokens": 2, "min_tokens": 3}), ("chat/completions", {"max_tokens": "3", "min_tokens": "2"}),
]  # fmt: skip


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, body): one field of a plain body at a time, and some together."""
    single = [(kind, {name: value}) for kind, of in FIELDS.items() for name, values in of.items() for value in values]
    return [(kind, BASES[kind] | fields) for kind, fields in (*single, *MORE)]


def main() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models = dict(zip(BASES, (ChatCompletionRequest, CompletionRequest, ResponsesRequest), strict=True))
    config = SimpleNamespace(max_model_len=CONTEXT_TOKENS)

    def serves(kind: str, body: dict[str, Any]) -> bool:
        try:
            request = models[kind].model_validate(body)
            for message in getattr(
                request, "messages", ()
            ):  # pydantic checks parts as they are read, and takes an object for them
                if (content := message.get("content")) is not None and not isinstance(content, str):
                    assert all(isinstance(part, dict | str) for part in content)
            request.build_tok_params(config)
            asked = getattr(request, "max_completion_tokens", None)
            asked = getattr(request, "max_tokens", None) if asked is None else asked
            request.to_sampling_params(CONTEXT_TOKENS if asked is None else min(asked, CONTEXT_TOKENS), {})
        except Exception:
            return False
        return True

    print(json.dumps([serves(kind, json.loads(json.dumps(body))) for kind, body in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
