"""A tiny random Whisper on real vLLM, through the gateway: what an SDK reads is what vLLM answers itself."""

import io
import math
import subprocess
import wave
from array import array
from collections.abc import Iterator

import openai
import pytest

from controlplane.fleet.models import Model
from scheduling.model_task import Task
from tests.gateway.conftest import open_sdk
from tests.vllm.conftest import ROOT, servers_of
from tests.vllm.gateway import gateway_before
from tests.vllm.tiny_whisper import POSITIONS

pytestmark = pytest.mark.vllm


def tone(seconds: float, hertz: float, rate: int = 16_000) -> bytes:
    """Return a WAV that is not silent."""
    file = io.BytesIO()
    samples = (int(9_000 * math.sin(2 * math.pi * hertz * at / rate)) for at in range(int(seconds * rate)))
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, rate, 0, "NONE", ""))
        written.writeframes(array("h", samples).tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def whisper(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("whisper")
    command = [vllm_python, "-m", "tests.vllm.tiny_whisper", folder / "model"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    with servers_of(vllm_python, folder / "run", folder / "model") as fleet:
        options = {"task": Task.TRANSCRIPTION, "max_model_len": POSITIONS, "max_num_batched_tokens": 2048}
        url = fleet.start("whisper", model="whisper", **options)
        fleet.wait("whisper", url)
        yield url


@pytest.mark.django_db(transaction=True)
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # translations, in the SDK
async def test_what_is_heard_is_what_vllm_hears(whisper: str) -> None:
    def to_hear() -> None:
        Model.objects.update(task="transcription", context_tokens=POSITIONS)

    async with (
        gateway_before({"whisper": whisper}, 4, model_name="whisper", prepare=to_hear) as served,
        open_sdk(served, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=f"{whisper}/v1", api_key="none", max_retries=0) as direct,
    ):
        given = {"model": "whisper", "temperature": 0.0, "language": "en", "extra_body": {"max_completion_tokens": 12}}
        heard = set()
        for hertz in (220.0, 1_760.0):
            file = ("tone.wav", tone(2.5, hertz))
            for kind in ("transcriptions", "translations"):
                asked = {name: value for name, value in given.items() if kind == "transcriptions" or name != "language"}
                ours, theirs = [await getattr(sdk.audio, kind).create(file=file, **asked) for sdk in (client, direct)]
                assert ours.to_dict() == theirs.to_dict()
                heard.add(ours.text)
            streams = [
                [event async for event in await sdk.audio.transcriptions.create(file=file, stream=True, **given)]
                for sdk in (client, direct)
            ]
            texts = ["".join(one.choices[0]["delta"].get("content") or "" for one in stream) for stream in streams]
            assert texts[0] == texts[1] != ""
        assert "" not in heard
        broken = ("tone.wav", b"RIFF and no sound")
        errors = []
        for sdk in (client, direct):
            with pytest.raises(openai.APIStatusError) as refused:
                await sdk.audio.transcriptions.create(file=broken, **given)
            errors.append(refused.value.status_code)
        assert errors[0] == errors[1]
        rows = await served.rows()
        assert [row.outcome for row in rows] == ["done"] * 6 + ["failed"]
        assert {row.prompt_tokens for row in rows[:6]} <= {251, 254}  # a stream counts the prompt of its decoder, too
        assert all(0 < row.output_tokens <= 12 for row in rows[:6])
