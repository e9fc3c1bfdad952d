"""What QLM's evaluation runs: models on GPUs, and the workloads W_A, W_B and W_C (section 8).

Lengths follow ShareGPT as vLLM's paper has them (prompts of 161 tokens on average, outputs of 338), drawn from lognormal
distributions, for the data set is not at hand. The dispatcher knows no output: it takes the mean of ordinary requests, or
of mega prompts. The paper does not say how many requests are of which class; what was chosen here stands with each workload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.experiments.shared.scenes import ServedModel
from scheduling.fleet.profile import Profile
from scheduling.simulation.workload.requests import Requests, make_requests

CLASSES: Final = ("interactive", "batch-1", "batch-2")
SLO_S: Final = (20.0, 60.0, 3600.0)
"""To the first token, by class; the paper's are of the 99th percentile."""
INTERACTIVE, BATCH_1, BATCH_2 = range(3)

# One GPU. Vidur's matrix products of Llama-2-7B (A100: 9.3 ms, 0.064 ms a token; A40: 26.3 ms, 0.12 ms a token), by
# parameters, and the keys and values of all tokens read at the GPU's bandwidth (A100 2.0 TB/s; A10 0.6 TB/s). Of the A10
# nothing was measured: the A40's, by bandwidth (696 to 600 GB/s) and by dense half precision (150 to 125 TFLOP/s). KV: 90 %
# of the memory less the weights; 128 KiB a token (Mistral, grouped queries) and 800 KiB (Vicuna).
VICUNA_A100: Final = ServedModel(
    "vicuna-13b", Profile(0.0179, 0.0, 1.23e-4, 0.0, 0.0179, 1.23e-4, 4.1e-7), 62_600, 256, 4096
)
MISTRAL_A100: Final = ServedModel(
    "mistral-7b", Profile(0.0100, 0.0, 6.9e-5, 0.0, 0.0100, 6.9e-5, 6.6e-8), 479_000, 256, 4096
)
MISTRAL_A10: Final = ServedModel(
    "mistral-7b", Profile(0.0329, 0.0, 1.55e-4, 0.0, 0.0329, 1.55e-4, 2.2e-7), 66_000, 256, 4096
)
# Four A100 as one instance: Llama-2-70B as measured (Splitwise), Mistral with what was measured of Llama-3.1-8B, Vicuna by
# its size from that.
LLAMA_NODE: Final = ServedModel(
    "llama-70b", Profile(0.0637, 0.0323, 1.791e-4, 1.15e-8, 0.0441, 1.63e-4, 2.32e-7), 522_000, 256, 4096
)
MISTRAL_NODE: Final = ServedModel(
    "mistral-7b", Profile(0.0303, 0.0184, 5.573e-5, 7.87e-10, 0.0069, 2.03e-4, 6.6e-9), 2_200_000, 256, 4096
)
VICUNA_NODE: Final = ServedModel(
    "vicuna-13b", Profile(0.0303, 0.0184, 9.06e-5, 7.87e-10, 0.0112, 2.03e-4, 1.0e-7), 345_000, 256, 4096
)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A fine-tuned model of W_B: who asks for it, and what exchanging it for another on a node of four A100 takes."""

    name: str
    base: ServedModel
    slo_class: int
    weights_gb: float

    @property
    def wake_s(self) -> float:
        """From CPU memory, at 20 GB/s for each GPU, and two seconds more."""
        return 2.0 + self.weights_gb / 80

    @property
    def reload_s(self) -> float:
        """From storage, at 3 GB/s, and five seconds more."""
        return 5.0 + self.weights_gb / 3


SLEEP_S: Final = 2.0
CPU_GB: Final = 320.0
"""Of a node, for models that sleep: what the paper reserves for Llama-70B (section 8.3)."""
TUNED: Final = (
    Tuned("mistral-7b-a", MISTRAL_NODE, BATCH_1, 14.5),
    Tuned("llama-70b-a", LLAMA_NODE, BATCH_1, 138.0),
    Tuned("vicuna-13b-b", VICUNA_NODE, BATCH_2, 26.0),
    Tuned("vicuna-13b-c", VICUNA_NODE, BATCH_2, 26.0),
    Tuned("llama-70b-d", LLAMA_NODE, BATCH_2, 138.0),
)
"""Batch-1 of two models, Batch-2 of three, as section 8 has them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals from time 0 on; *waiting* requests are there from the begin."""

    slo_class: int
    requests_per_s: float
    model: int = 0
    waiting: int = 0


MEAN_TOKENS: Final = (161.0, 338.0)
"""Of ShareGPT's prompts and outputs."""
SPREAD: Final = (1.1, 0.8)
"""Standard deviations of their logarithms, chosen to look like the paper's figure 8."""
MOST_TOKENS: Final = (2048, 1900)
MEGA_TOKENS: Final = (3000, 4000)
"""Prompt and output together of a mega prompt (section 8, W_C)."""
MEGA_OUTPUT: Final = (100, 1000)


def draw(streams: Sequence[Stream], duration_s: float, seed: int, mega_share: float = 0.0) -> Requests:
    """The requests of *streams* over *duration_s* seconds; *mega_share* of them, of any class, are mega prompts."""
    random = np.random.default_rng([seed, 8])
    arrivals, classes, models = [], [], []
    for stream in streams:
        count = int(random.poisson(stream.requests_per_s * duration_s))
        times = [np.zeros(stream.waiting), random.uniform(0.0, duration_s, count)]
        arrivals.append(np.concatenate(times))
        classes.append(np.full(stream.waiting + count, stream.slo_class))
        models.append(np.full(stream.waiting + count, stream.model))
    order = np.argsort(np.concatenate(arrivals), kind="stable")
    arrival_s, slo_class, model = (np.concatenate(each)[order] for each in (arrivals, classes, models))
    tokens = []
    for mean, spread, most in zip(MEAN_TOKENS, SPREAD, MOST_TOKENS, strict=True):
        drawn = mean * np.exp(spread * random.standard_normal(order.size) - spread**2 / 2)
        tokens.append(np.clip(np.rint(drawn), 4, most).astype(np.int64))
    prompt, output = tokens
    mega = random.random(order.size) < mega_share
    mega_output = random.integers(*MEGA_OUTPUT, order.size)
    total = random.integers(*MEGA_TOKENS, order.size)
    output = np.where(mega, mega_output, output)
    prompt = np.where(mega, total - mega_output, prompt)
    predicted = np.full(order.size, 1)
    for kind in (mega, ~mega):
        if kind.any():
            predicted[kind] = max(1, round(float(output[kind].mean())))
    slo_s = np.array(SLO_S)
    return make_requests(
        arrival_s,
        prompt,
        output,
        predicted_tokens=predicted,
        model=model,
        slo_class=slo_class,
        priority=slo_class,
        deadline_s=slo_s[slo_class],
    )
