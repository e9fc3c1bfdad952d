"""Transcriptions and translations through the gateway, against an emulated instance that hears."""

# ruff: noqa: F811 (fixtures that are imported)

import io
import json
import wave

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.admission.forms import read_form, with_field
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.errors import ApiError
from controlplane.gateway.upstream.bodies import payload
from tests.gateway.conftest import open_sdk
from tests.gateway.test_answers import DONE, http, plays, stream
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)
from workers.vllm.sound import seconds_of


def sound(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, rate, 0, "NONE", ""))
        written.writeframes(bytes(2 * int(rate * seconds)))
    return file.getvalue()


def form(**fields: object) -> tuple[bytes, bytes]:
    """Return a form and its content type; `file` is bytes."""
    parts = [b"preamble"]
    for name, value in fields.items():
        file = b'; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else b""
        content = value if isinstance(value, bytes) else str(value).encode()
        head = b'\r\n--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (name.encode(), file)
        parts += [head, content]
    return b"".join([*parts, b"\r\n--xyz--\r\n"]), b'multipart/form-data; boundary="xyz"'


def test_a_form_is_read_with_the_seconds_of_its_sound():
    raw, content_type = form(model="w", prompt="gr\u00fc\u00df\r\n--xy", file=sound(2.5), stream="true")
    read = read_form(raw, content_type)
    assert read.fields == {"model": "w", "prompt": "gr\u00fc\u00df\r\n--xy", "stream": "true"}
    assert read.seconds == pytest.approx(2.5, abs=0.01)
    call = Call.read(raw, Kind.TRANSCRIPTION, max_depth=9, content_type=content_type)
    assert (call.model, call.stream, call.include_usage, call.prompt_tokens) == ("w", True, False, 251)


@pytest.mark.parametrize(
    ("raw", "content_type", "code", "param"),
    [
        (*form(file=b"x"), "missing_required_parameter", "model"),
        (*form(model="w"), "missing_required_parameter", "file"),
        (b'{"model":"w"}', b"application/json", "invalid_type", "file"),
        (form(model="w", file=b"x")[0], b"multipart/form-data", "invalid_type", "file"),
        (form(model="w", file=b"x")[0][:-9], b"multipart/form-data; boundary=xyz", "invalid_form", None),
        (b"", b"multipart/form-data; boundary=xyz", "invalid_form", None),
        (b"--xyz\r\n\r\nx\r\n--xyz--", b"multipart/form-data; boundary=xyz", "invalid_form", None),
        (*form(**{f"f{n}": n for n in range(200)}), "invalid_form", None),
        (*form(model="w", file=b"x", prompt="p" * 70_000), "invalid_value", "prompt"),
    ],
)
def test_a_wrong_form_is_refused_and_its_field_is_named(raw, content_type, code, param):
    with pytest.raises(ApiError) as refused:
        Call.read(raw, Kind.TRANSCRIPTION, max_depth=9, content_type=content_type)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


@given(raw=st.binary(max_size=200), content_type=st.sampled_from([b"multipart/form-data; boundary=xyz", b"a/b", b""]))
def test_any_bytes_are_read_or_refused(raw, content_type):
    for body in (raw, b"--xyz\r\n" + raw + b"\r\n--xyz--", form(model="w", file=raw)[0]):
        try:
            Call.read(body, Kind.TRANSLATION, max_depth=9, content_type=content_type)
        except ApiError as error:
            refused = error
        else:
            refused = None
        assert refused is None or refused.status == 400


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (sound(1.0, 16_000), 1.0),
        (b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + bytes(12) + b"x" * 10_000, 10.0),  # no rate: the slowest
        (b"fLaC" + b"x" * 100_000, 2.0),
        (b"OggS" + b"x" * 4_000, 1.0),
        (b"ID3" + b"x" * 32_000, 2.0),
        (b"", 0.0),
    ],
)
def test_the_seconds_of_a_sound(data, seconds):
    assert seconds_of(data) == pytest.approx(seconds, rel=0.01)


def test_usage_of_a_stream_is_asked_for_as_the_last_field_of_the_form():
    raw, content_type = form(model="w", file=b"x", stream="true", stream_include_usage="false")
    call = Call.read(raw, Kind.TRANSCRIPTION, max_depth=9, content_type=content_type)
    sent = b"".join(payload(call, 3))
    assert sent.startswith(raw[: raw.rfind(b"--xyz--")])
    assert read_form(sent, content_type).fields["stream_include_usage"] == "true"
    call.stream = False
    assert b"".join(payload(call, 3)) == raw
    assert read_form(with_field(raw, content_type, "a", "b"), content_type).fields["a"] == "b"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the SDK of its own overloads
@pytest.mark.parametrize("surface", ["transcriptions", "translations"])
async def test_the_sdk_gets_a_text_and_the_ledger_its_seconds(emulated, surface):
    """C63."""
    async with open_sdk(emulated, max_retries=0) as client:
        audio = getattr(client.audio, surface)
        text = await audio.create(model="w", file=("a.wav", sound(3.0)), prompt="A watch.", response_format="json")
        verbose = await audio.create(model="w", file=("a.wav", sound(3.0)), response_format="verbose_json")
    assert text.text
    assert float(verbose.duration) == pytest.approx(3.0, abs=0.01)
    rows = await emulated.rows()
    for row, said in zip(rows, (text.text, verbose.text), strict=True):
        assert (row.surface, row.outcome, row.model, row.streamed) == (f"audio/{surface}", "done", "w", False)
        assert (row.prompt_tokens, row.predicted_prompt_tokens) == (
            pytest.approx(301, abs=1),
            pytest.approx(301, abs=1),
        )
        assert row.output_tokens == round(len(said) / 4)
        assert row.predicted_output_tokens > 0


@pytest.mark.parametrize("usage", [True, False])
async def test_a_streamed_transcription_has_the_instances_events_and_usage_as_asked(emulated, usage):
    data = aiohttp.FormData()
    fields = {"model": "w", "stream": "true"} | ({"stream_include_usage": "true"} if usage else {})
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field("file", sound(2.0), filename="a.wav")
    url = f"{emulated.url}/v1/audio/transcriptions"
    async with emulated.http.post(url, data=data, headers=emulated.headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        *events, done = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    events = [json.loads(event) for event in events]
    assert {event["object"] for event in events} == {"transcription.chunk"}
    assert any("usage" in event for event in events) is usage
    row = await emulated.new_row()
    assert (row.outcome, row.streamed, row.prompt_tokens) == ("done", True, pytest.approx(200, abs=1))
    assert row.ttft_ms > 0
    if usage:
        assert row.output_tokens == events[-1]["usage"]["completion_tokens"]


async def test_a_stream_of_clips_ends_with_its_last_event_alone(served):
    """Each half minute of a sound finishes: what breaks off after one is not whole."""
    clip = {"object": "transcription.chunk", "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    raw, content_type = form(model="m", file=sound(0.1), stream="true")
    headers = served.headers | {"Content-Type": content_type.decode()}
    for pieces, outcome, said in (((clip, clip, DONE), "done", 2), ((clip, clip), "failed", 2)):
        plays(served, stream(*pieces))
        url = f"{served.url}/v1/audio/transcriptions"
        async with served.http.post(url, data=raw, headers=headers) as answer:
            text = await answer.text()
        assert text.count('"content": "a"') == said
        assert (await served.new_row()).outcome == outcome
    assert "upstream_interrupted" in text
    assert served.backends[0].headers[-1]["Content-Type"] == content_type.decode()


async def test_a_model_that_cannot_hear_says_so_in_one_error(emulated):
    raw, content_type = form(model="e", file=sound(0.1))
    headers = emulated.headers | {"Content-Type": content_type.decode()}
    url = f"{emulated.url}/v1/audio/transcriptions"
    async with emulated.http.post(url, data=raw, headers=headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (404, "unsupported_endpoint")
    raw = form(model="m", file=sound(0.1))[0]  # it generates: only its server knows whether from sound too
    async with emulated.http.post(url, data=raw, headers=headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (404, "unsupported_endpoint")
    assert "does not serve this call" in error["message"]
    assert (await emulated.new_row()).error_code == "refused_by_instance"


async def test_a_text_that_is_none_is_the_instances_failure(served):
    raw, content_type = form(model="m", file=sound(0.1))
    plays(served, http(200, b'{"text":7}'))
    headers = served.headers | {"Content-Type": content_type.decode()}
    async with served.http.post(f"{served.url}/v1/audio/transcriptions", data=raw, headers=headers) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["message"].endswith("a JSON object without text.")) == (502, True)
