"""Transcription and translation by an emulated server, in the shapes of vLLM 0.32: its words are those of any answer.

The engine gets a sound as one prompt of as many token ids as vLLM counts for it, cut to the context;
vLLM cuts it into clips.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from workers.emulator.answers import PlainAnswer, Sequence, StreamAnswer, framed
from workers.emulator.bodies import INT64, CompletionBody, PlainBody, StreamOptions, wrong
from workers.emulator.generation import Generation, resolve
from workers.emulator.spec import InstanceSpec
from workers.vllm.sound import seconds_of, sound_tokens

SUPPORTED = ("text", "json", "verbose_json", "diarized_json")
USUAL_TOKENS = 224
"""Room for the text where the caller sets no limit: half of Whisper's context."""
VOCABULARY = 50_000


class SpeechForm(PlainBody):
    """The fields of the form but for its file."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: INT64 | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Generation):
    """A checked form with its sound."""

    form: SpeechForm
    task: Literal["transcribe", "translate"]
    seconds: float


def hear(form: SpeechForm, sound: bytes, path: str, spec: InstanceSpec) -> Heard:
    """Check values as vLLM does. Raises ApiError."""
    chosen = form.response_format
    if chosen not in SUPPORTED:
        raise wrong("Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`")
    if chosen == "diarized_json":
        raise wrong(f"Currently do not support diarized_json for {form.model or spec.model}")
    if chosen == "verbose_json" and form.stream:
        raise wrong("verbose_json format doesn't support streaming case")
    if not sound:
        raise wrong("Invalid or unsupported audio file.")
    if form.stream_include_usage and not form.stream:
        raise wrong("Stream options can only be defined when `stream=True`.", "stream_include_usage")
    seconds = seconds_of(sound)
    most = min(form.max_completion_tokens or USUAL_TOKENS, spec.max_model_len - 1)
    tokens = min(sound_tokens(seconds), spec.max_model_len - most)
    body = CompletionBody(
        model=form.model,
        prompt=[zlib.crc32(sound) % VOCABULARY] * tokens,
        max_tokens=most,
        temperature=form.temperature,
        top_p=form.top_p,
        top_k=form.top_k,
        seed=form.seed,
        stream=form.stream,
        stream_options=StreamOptions(
            include_usage=form.stream_include_usage, continuous_usage_stats=form.stream_continuous_usage_stats
        ),
    )
    one = resolve(body, spec)
    task: Literal["transcribe", "translate"] = "translate" if path.endswith("translations") else "transcribe"
    return Heard(one.body, one.prompts, one.max_tokens, form=form, task=task, seconds=seconds)


def _heard(answer: PlainAnswer | StreamAnswer) -> Heard:
    assert isinstance(answer.generation, Heard)
    return answer.generation


class PlainSpeech(PlainAnswer):
    """A text that is sent as one body."""

    def body(self) -> bytes:
        heard, (sequence,) = _heard(self), self.sequences
        said = sequence.written()
        if heard.form.response_format == "verbose_json":
            segment = {
                "id": 0, "avg_logprob": -0.2, "compression_ratio": 1.0, "end": heard.seconds, "no_speech_prob": None,
                "seek": 0, "start": 0.0, "temperature": heard.form.temperature, "text": said,
                "tokens": sequence.token_ids(0, sequence.produced),
            }  # fmt: skip
            answer: dict[str, Any] = {"duration": heard.seconds, "language": heard.form.language or "en", "text": said}
            return orjson.dumps(answer | {"segments": [segment], "words": None})
        if heard.task == "translate":  # vLLM says no usage of it
            return orjson.dumps({"text": said})
        return orjson.dumps({"text": said, "usage": {"type": "duration", "seconds": -int(-heard.seconds // 1)}})


class StreamSpeech(StreamAnswer):
    """A text that is sent event by event."""

    def usage(self, completion_tokens: int | None = None) -> dict[str, int]:
        said = super().usage(completion_tokens)["completion_tokens"]
        prompt = sound_tokens(_heard(self).seconds)
        return {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}

    def closed(self) -> None:
        end = b"data: [DONE]\n\n"
        if self.generation.include_usage:
            chunk = {**self._head(), "choices": [], "usage": self.usage()}
            end = b"data: " + orjson.dumps(chunk) + b"\n\n" + end
        self._write(framed(end))
        self.finish()

    def _head(self) -> dict[str, Any]:
        kind = "translation.chunk" if _heard(self).task == "translate" else "transcription.chunk"
        return {"id": self.request_id, "object": kind, "created": self.created_s, "model": self.model}

    def _event(self, sequence: Sequence, piece: str, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"delta": {"content": piece}}
        if finish_reason:
            choice |= {"finish_reason": finish_reason, "stop_reason": sequence.stop_reason}
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if self._continuous:
            chunk["usage"] = self.usage()
        return b"data: " + orjson.dumps(chunk) + b"\n\n"
