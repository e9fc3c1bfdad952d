"""What a request asks the engine for, checked against the server's limits as vLLM 0.32 does.

Fields whose effect cannot be emulated without a model (log probabilities, beam search, constrained decoding, token ids in
the answer, prompt embeddings) are answered with 501 instead of an answer that lacks what was asked for.
"""

import math
import zlib
from array import array
from dataclasses import dataclass

from workers.emulator import text
from workers.emulator.protocol.bodies import ChatBody, CompletionBody, Kind
from workers.emulator.protocol.errors import ApiError, wrong
from workers.emulator.spec import InstanceSpec

MAX_TOKEN_ID = 2**31 - 1  # an emulated vocabulary has every id that fits


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text, or its token ids."""

    text: str
    ids: tuple[int, ...] | None = None

    @property
    def echo(self) -> str:
        return self.text if self.ids is None else text.detokenize(self.ids)

    @property
    def tokens(self) -> int:
        return text.count_tokens(self.text) if self.ids is None else len(self.ids)

    @property
    def digest(self) -> int:
        """A number for its content, the same in every process (Python's own hash is salted)."""
        return zlib.crc32(self._encoded())

    def prefix_hashes(self, block_tokens: int) -> tuple[int, ...]:
        """For each full block of tokens a number that stands for all content up to its end."""
        data = self._encoded()
        size = block_tokens * (text.CHARACTERS_PER_TOKEN if self.ids is None else 8)
        hashes = []
        value = 0
        for end in range(size, len(data) + 1, size):
            value = zlib.crc32(data[end - size : end], value)
            hashes.append(value)
        return tuple(hashes)

    def _encoded(self) -> bytes:
        # One byte a character, so that blocks of bytes are blocks of tokens; what is lost only merges rare characters.
        return self.text.encode("latin-1", "replace") if self.ids is None else array("q", self.ids).tobytes()


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: `n` sequences for each prompt. Lengths in tokens."""

    kind: Kind
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: tuple[int, ...]  # for each prompt, cut to the context
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    seed: int | None
    greedy: bool
    echo: bool


def resolve(body: CompletionBody | ChatBody, spec: InstanceSpec) -> Generation:
    """Check values against the server's limits. Raises ApiError as vLLM answers."""
    _check_emulated(body)
    prompts: tuple[Prompt, ...]
    if isinstance(body, ChatBody):
        prompts = (_chat_prompt(body),)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        asked_name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    else:
        prompts = _completion_prompts(body)
        asked, asked_name = (16 if body.max_tokens is None else body.max_tokens), "max_tokens"
    if asked is not None and asked > spec.max_model_len:
        raise wrong(
            f"{asked_name}={asked} cannot be greater than max_model_len={spec.max_model_len}. "
            "Please request fewer output tokens.",
            asked_name,
            asked,
        )
    for prompt in prompts:
        _check_length(prompt, spec.max_model_len)
    max_tokens = tuple(
        spec.max_model_len - prompt.tokens if asked is None else min(asked, spec.max_model_len - prompt.tokens)
        for prompt in prompts
    )
    _check_sampling(body, min(max_tokens))
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Generation(
        kind="chat" if isinstance(body, ChatBody) else "completion",
        prompts=prompts,
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=tuple(stop),
        include_stop=body.include_stop_str_in_output,
        stream=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        priority=body.priority,
        seed=body.seed,
        greedy=body.temperature == 0,
        echo=bool(body.echo) and isinstance(body, CompletionBody),
    )


def _check_emulated(body: CompletionBody | ChatBody) -> None:
    """Refuse what needs a model. `tools` with automatic choice is refused as by a vLLM without a tool parser."""
    unsupported = {
        "logprobs": body.logprobs not in (None, False),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "use_beam_search": body.use_beam_search,
        "return_token_ids": bool(body.return_token_ids),
        "structured_outputs": body.structured_outputs is not None,
        "response_format": body.response_format is not None and body.response_format.type != "text",
        "suffix": isinstance(body, CompletionBody) and bool(body.suffix),
        "prompt_embeds": isinstance(body, CompletionBody) and bool(body.prompt_embeds),
        "echo": isinstance(body, ChatBody) and body.echo,
    }
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        if body.tool_choice in (None, "auto"):
            raise wrong('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        unsupported["tool_choice"] = True
    for name, asked in unsupported.items():
        if asked:
            raise ApiError(501, "NotImplementedError", f"`{name}` is not supported by the emulated server.", name)


def _chat_prompt(body: ChatBody) -> Prompt:
    """The conversation as a chat template would write it."""
    if not body.messages:
        raise wrong("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = []
    for message in body.messages:
        content = message.content or ""
        if isinstance(content, list):
            content = "\n".join(item if isinstance(item, str) else item.text or "" for item in content)
        parts.append(f"<|{message.role}|>\n{content}<|end|>\n")
    return Prompt("".join(parts) + "<|assistant|>\n")


def _completion_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return (_text_prompt(prompt),)
    if not prompt:
        raise wrong("You must pass at least one prompt")
    if isinstance(prompt[0], int):
        return (_token_prompt(prompt),)
    return tuple(_text_prompt(item) if isinstance(item, str) else _token_prompt(item) for item in prompt)


def _text_prompt(prompt: str) -> Prompt:
    if not prompt:
        raise wrong("The decoder prompt cannot be empty")
    return Prompt(prompt)


def _token_prompt(ids: list[int]) -> Prompt:
    if not ids:
        raise wrong("The decoder prompt cannot be empty")
    if max(ids) > MAX_TOKEN_ID:
        raise wrong(f"Token id {max(ids)} is out of vocabulary")
    return Prompt("", tuple(ids))


def _check_length(prompt: Prompt, limit: int) -> None:
    if prompt.tokens <= limit:
        return
    start = f"This model's maximum context length is {limit} tokens. However, your prompt contains"
    end = "Please reduce the length of the input prompt."
    if prompt.ids is None:
        characters, bound = len(prompt.text), limit * text.CHARACTERS_PER_TOKEN
        raise wrong(
            f"{start} {characters} characters (more than {bound} characters, which is the upper bound "
            f"for {limit} input tokens). {end}",
            "input_text",
            characters,
        )
    raise wrong(
        f"{start} {prompt.tokens} input tokens, which exceeds this limit even without any output tokens. {end}",
        "input_tokens",
        prompt.tokens,
    )


def _check_sampling(body: CompletionBody | ChatBody, max_tokens: int) -> None:
    """The order and texts of vLLM's SamplingParams."""
    if body.n is not None and body.n < 1:
        raise wrong(f"n must be at least 1, got {body.n}.")
    for name, value in (("presence_penalty", body.presence_penalty), ("frequency_penalty", body.frequency_penalty)):
        if value is not None and not -2.0 <= value <= 2.0:
            raise wrong(f"{name} must be in [-2, 2], got {value}.")
    if (penalty := body.repetition_penalty) is not None and (not math.isfinite(penalty) or penalty <= 0.0):
        raise wrong(f"repetition_penalty must be greater than zero, got {penalty}.")
    if (temperature := body.temperature) is not None:
        if not math.isfinite(temperature):
            raise wrong(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
        if temperature < 0.0:
            raise wrong(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if temperature > 2.0:
            raise wrong(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise wrong(f"top_p must be in (0, 1], got {body.top_p}.", "top_p", body.top_p)
    if body.top_k is not None and body.top_k < -1:
        raise wrong(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.min_p is not None and not 0.0 <= body.min_p <= 1.0:
        raise wrong(f"min_p must be in [0, 1], got {body.min_p}.")
    if max_tokens < 1:
        raise wrong(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if body.min_tokens < 0:
        raise wrong(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > max_tokens:
        raise wrong(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.")
    if any(not item for item in ([body.stop] if isinstance(body.stop, str) else body.stop or [])):
        raise wrong("stop cannot contain an empty string.")
