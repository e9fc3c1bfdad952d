"""Estimates of performance profiles that were not measured, from the sizes of the model and the GPU's data sheet.

The roofline of a transformer's forward pass: a step reads its weights at memory bandwidth and computes two
operations per parameter and token. The slower of both counts, because they overlap. It also reads the keys and
values of the decoded sequences. A mixture of experts reads the experts that its batch hits: of E experts with k
per token, a share of 1 - (1 - k/E)^batch. Added to that are the kernels of each layer, the exchange between GPUs,
and the engine's work per sequence.

`python -m tests.bench estimator` fits the constants (`Costs`) and prints the errors of estimates against measured steps
of vLLM, leaving out one GPU and one model at a time: in the median 5% to 9% for dense models and 5% to 17% for mixtures
of experts. Experts in 4-bit integers are read up to two and a half times slower than estimated. Prefills of dense models
are from our own measurements of vLLM 0.26 (5% off in the median); engines of 2025 took longer to a first token (28% off in
the median). Those of mixtures are fitted to these engines: 11% to 31% off in the median on a GPU or model left out,
where the rule for dense models is 66% off. A prompt hits every expert with few tokens, so these are read and computed
at a third of the data sheet's figures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduling.fleet.profile import Profile

BITS_16: Final = 2.0
"""Bytes per parameter; below `FEWER_BITS`, operations are 8-bit."""
FEWER_BITS: Final = 1.5
MANY_TOKENS: Final = 1 << 16
"""Weights of a step that hits every expert."""
USUAL_MAX_NUM_SEQS: Final = 64
EXCHANGE_BYTES_PER_S: Final = 3.35e12
"""Bandwidth of the GPU that `Costs.exchange_s` refers to."""
LINK_SHARE: Final = 450 / 3350
"""Interconnect bandwidth of a GPU as a share of its memory bandwidth: H100, and similar for A100 and B200."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Fitted constants that data sheets do not give. Seconds are per step; shares are of the data sheet's figure."""

    layer_s: float
    """Time of one layer's kernels beyond memory and compute."""
    exchange_s: float
    """Exchange of one layer between several H100."""
    choice_s: float
    """Routing of one layer, per expert and expert used by a token (E x k)."""
    sequence_s: float
    """Engine work per sequence: sampling, detokenising."""
    bandwidth_share: float
    compute_share_16_bit: float = 0.75
    compute_share_8_bit: float = 0.5
    attention_share: float = 0.48
    """Share of 16-bit operations for the part of attention that is quadratic in the prompt."""
    prefill_s: float = 0.012
    """Time beyond the step: the first token travels all the way to the client."""
    experts_read_share: float = 0.32
    """In the prefill of a mixture of experts: share of the bandwidth,"""
    experts_compute_share: float = 0.34
    """share of the operations,"""
    experts_exchange: float = 5.9
    """and exchange between GPUs, which includes the experts' inputs, per exchange of a dense model."""


FITTED: Final = Costs(layer_s=54e-6, exchange_s=36e-6, choice_s=1.55e-8, sequence_s=22e-6, bandwidth_share=0.975)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model, over all GPUs of an instance. Raises ValueError naming an invalid one.

    0 is unknown: *parameters* then fill the weights in 16 bits, all of them are *active* for a token, *layers* are
    those usual for that size, and there are no experts.
    """

    weights_bytes: float
    kv_bytes_per_token: float
    parameters: float = 0.0
    active_parameters: float = 0.0
    layers: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name, least in (("weights_bytes", 1.0), ("kv_bytes_per_token", 1.0), ("parameters", 0.0), ("layers", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least:g}, not {getattr(self, name)!r}")
        if not 0 <= self.active_parameters <= self.of_all:
            raise ValueError(f"of {self.of_all:g} parameters {self.active_parameters:g} cannot be active")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"of {self.experts} experts a token cannot take {self.experts_per_token}")

    @property
    def of_all(self) -> float:
        return self.parameters or self.weights_bytes / BITS_16

    @property
    def of_a_token(self) -> float:
        return self.active_parameters or self.of_all

    @property
    def depth(self) -> float:
        """Layers; if not given, by the sizes of published models (8B: 32, 70B: 80)."""
        return self.layers or 32.0 * (math.sqrt(self.of_all * self.of_a_token) / 8e9) ** 0.42

    @property
    def width(self) -> float:
        """Width of the hidden state, as a layer holds about twelve times its square."""
        return math.sqrt(self.of_a_token / (12.0 * self.depth))

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step of *tokens* reads."""
        if not self.experts or self.experts == self.experts_per_token:
            return self.weights_bytes
        of_an_expert = (self.of_all - self.of_a_token) / (self.experts - self.experts_per_token)
        of_experts = min(1.0, self.experts * of_an_expert / self.of_all)
        hit = 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.weights_bytes * (1.0 - of_experts + of_experts * hit)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU by NVIDIA's data sheet: memory in bytes, bandwidth in bytes a second, dense operations a second.

    *flops_8_bit* equals *flops_16_bit* if there are no 8-bit floats.
    """

    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_16_bit: float
    flops_8_bit: float
    link_bytes_per_s: float
    """Four fifths of its PCIe link to CPU memory, of 16 lanes of the fourth or fifth generation."""


GPUS: Final = {
    "a100-80gb": GpuFacts("A100 80 GB", 85_899_345_920, 2.039e12, 312e12, 312e12, 25e9),
    "a100-40gb": GpuFacts("A100 40 GB", 42_949_672_960, 1.555e12, 312e12, 312e12, 25e9),
    "h100-80gb": GpuFacts("H100 80 GB", 85_899_345_920, 3.35e12, 989e12, 1_978e12, 50e9),
    "h200-141gb": GpuFacts("H200 141 GB", 151_397_597_184, 4.8e12, 989e12, 1_978e12, 50e9),
    "b200-180gb": GpuFacts("B200 180 GB", 193_273_528_320, 7.7e12, 2_250e12, 4_500e12, 50e9),
    "l40s-48gb": GpuFacts("L40S 48 GB", 48_305_799_168, 0.864e12, 362e12, 733e12, 25e9),
    "l4-24gb": GpuFacts("L4 24 GB", 25_769_803_776, 0.3e12, 121e12, 242e12, 25e9),
    "a30-24gb": GpuFacts("A30 24 GB", 25_769_803_776, 0.933e12, 165e12, 165e12, 25e9),
}
"""By the names of GPU types in an inventory."""


def facts_of(gpu_type: str) -> GpuFacts | None:
    """Return the data of the GPU type *gpu_type*, else of the only GPU whose name has the same first word (`h100-sxm`)."""
    if gpu_type in GPUS:
        return GPUS[gpu_type]
    word = gpu_type.lower().replace("_", "-").partition("-")[0]
    alike = [facts for name, facts in GPUS.items() if name.partition("-")[0] == word]
    return alike[0] if len(alike) == 1 else None


def link_bytes_per_s(gpu_type: str) -> float:
    """Return how fast KV comes from CPU memory to one GPU of *gpu_type*; for an unknown one, that of an A100."""
    return (facts_of(gpu_type) or GPUS["a100-80gb"]).link_bytes_per_s


def estimate(
    sizes: Sizes,
    gpu: GpuFacts,
    tensor_parallel: int,
    max_num_seqs: int = USUAL_MAX_NUM_SEQS,
    costs: Costs = FITTED,
) -> Profile:
    """Return the profile of a model of *sizes* on *tensor_parallel* of *gpu*. Raise
    ValueError for an invalid number of GPUs.

    A profile is linear in the batch, an estimate is not: the result is the closest line
    for batches up to *max_num_seqs*.
    """
    if tensor_parallel < 1 or max_num_seqs < 1:
        raise ValueError(f"{tensor_parallel} GPUs cannot serve {max_num_seqs} sequences")
    is_8_bit = sizes.weights_bytes / sizes.of_all < FEWER_BITS
    flops = gpu.flops_8_bit * costs.compute_share_8_bit if is_8_bit else gpu.flops_16_bit * costs.compute_share_16_bit
    token_s = 2.0 * sizes.of_a_token / (tensor_parallel * flops)
    bytes_per_s = tensor_parallel * gpu.bandwidth_bytes_per_s * costs.bandwidth_share
    layer_s = costs.layer_s + costs.choice_s * sizes.experts * sizes.experts_per_token
    exchange_s = 0.0
    if tensor_parallel > 1:  # interconnects have grown with memory bandwidth
        layer_s += costs.exchange_s * EXCHANGE_BYTES_PER_S / gpu.bandwidth_bytes_per_s
        # Twice per layer, the hidden state in 16 bits is summed over all GPUs and sent back.
        sent_bytes = 2.0 * sizes.depth * sizes.width * BITS_16 * 2.0 * (tensor_parallel - 1) / tensor_parallel
        exchange_s = sent_bytes / (LINK_SHARE * gpu.bandwidth_bytes_per_s)
    kernels_s = sizes.depth * layer_s

    def decode_s(batch: int) -> float:
        work_s = max(sizes.read_bytes(batch) / bytes_per_s, token_s * batch)
        return kernels_s + work_s + (exchange_s + costs.sequence_s) * batch

    fixed_s, sequence_s = _line(decode_s, max_num_seqs)
    prefill_a_s, prefill_b_s = costs.prefill_s, token_s + exchange_s
    if sizes.experts:
        share = costs.experts_read_share / costs.bandwidth_share
        prefill_a_s += kernels_s + sizes.read_bytes(MANY_TOKENS) / (share * bytes_per_s)
        sheet_flops = gpu.flops_8_bit if is_8_bit else gpu.flops_16_bit
        operations_per_s = tensor_parallel * sheet_flops * costs.experts_compute_share
        prefill_b_s = 2.0 * sizes.of_a_token / operations_per_s + costs.experts_exchange * exchange_s
    attention_flops = tensor_parallel * gpu.flops_16_bit * costs.attention_share
    return Profile(
        prefill_t0_s=costs.prefill_s + kernels_s + sizes.read_bytes(MANY_TOKENS) / bytes_per_s,
        prefill_a_s=prefill_a_s,
        prefill_b_s_per_token=prefill_b_s,
        # Causal attention: half of four operations per pair of tokens, layer and element of the hidden state.
        prefill_c_s_per_token2=2.0 * sizes.depth * sizes.width / attention_flops,
        decode_a_s=fixed_s,
        decode_b_s_per_sequence=sequence_s,
        decode_c_s_per_token=sizes.kv_bytes_per_token / bytes_per_s,
    )


def _line(step_s: Callable[[int], float], most: int) -> tuple[float, float]:
    """Return (a, b) of a + b x batch with the least relative square error, over batches that double to *most*."""
    batches = sorted({*(2**power for power in range(most.bit_length())), most})
    seconds = np.array([step_s(batch) for batch in batches])
    if len(batches) == 1:
        return float(seconds[0]), 0.0
    columns = np.array([[1.0, batch] for batch in batches]) / seconds[:, None]
    (fixed_s, sequence_s), *_ = np.linalg.lstsq(columns, np.ones(len(batches)), rcond=None)
    if fixed_s <= 0.0:  # all of it grows with the batch
        return float(seconds[0]) / 2, float(seconds[-1]) / most
    return float(fixed_s), max(0.0, float(sequence_s))
