"""A performance profile where nobody has measured one: from the sizes of the model and the data sheet of the GPU.

A step reads the weights once and the KV cache of what it decodes, at the speed of the memory, and computes two operations
for a parameter and token: the roofline of a transformer's forward pass. To that come the engine and the starts of kernels.

The constants were fitted to 14 measured series of vLLM (TTFT and TPOT of Llama 3.1 70B and Qwen3 32B on H100, H200 and B200,
aiconfigurator's dump of April 2026): decode steps are off by 13 % in the median series (11 to 19 %), prefills by 21 % (6 to
63 %, worst on eight B200). An 8B model, measured at few settings, is estimated up to twice as slow. The profiles of
Splitwise and SageServe (2023 and 2024, slower engines) lie within a factor of four. The share of attention that is quadratic
in the prompt is left out.
"""

from dataclasses import dataclass
from typing import Final

from scheduling.fleet.profile import Profile

STEP_S: Final = 0.005
"""Of the engine and the starts of kernels, in every step."""
SEQUENCE_S: Final = 33e-6
"""Of the engine for each sequence of a step: sampling, detokenising."""
PREFILL_S: Final = 0.03
"""Of a prefill beside its operations: it is a step, and the first token goes the whole way to the client."""
MEMORY_EFFICIENCY: Final = 0.8
"""Of the data sheet's bandwidth: what streaming reads reach."""
COMPUTE_EFFICIENCY: Final = 0.45
"""Of the data sheet's dense operations."""
BITS_16: Final = 2.0
"""Bytes of a parameter; with fewer than `FEWER_BITS`, operations are of 8 bits."""
FEWER_BITS: Final = 1.5


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU by NVIDIA's data sheet: memory in bytes, bandwidth in bytes a second, dense operations a second.

    *flops_8_bit* is that of *flops_16_bit* where there are no 8-bit floats.
    """

    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_16_bit: float
    flops_8_bit: float


GPUS: Final = {
    "a100-80gb": GpuFacts("A100 80 GB", 85_899_345_920, 2.039e12, 312e12, 312e12),
    "a100-40gb": GpuFacts("A100 40 GB", 42_949_672_960, 1.555e12, 312e12, 312e12),
    "h100-80gb": GpuFacts("H100 80 GB", 85_899_345_920, 3.35e12, 989e12, 1_978e12),
    "h200-141gb": GpuFacts("H200 141 GB", 151_397_597_184, 4.8e12, 989e12, 1_978e12),
    "b200-180gb": GpuFacts("B200 180 GB", 193_273_528_320, 7.7e12, 2_250e12, 4_500e12),
    "l40s-48gb": GpuFacts("L40S 48 GB", 48_305_799_168, 0.864e12, 362e12, 733e12),
    "l4-24gb": GpuFacts("L4 24 GB", 25_769_803_776, 0.3e12, 121e12, 242e12),
    "a30-24gb": GpuFacts("A30 24 GB", 25_769_803_776, 0.933e12, 165e12, 165e12),
}
"""By the names that GPU types have in an inventory."""


def facts_of(gpu_type: str) -> GpuFacts | None:
    """The facts of the GPU type called *gpu_type*, else of the one GPU whose name has the same first word (`h100-sxm`)."""
    if gpu_type in GPUS:
        return GPUS[gpu_type]
    word = gpu_type.lower().replace("_", "-").partition("-")[0]
    alike = [facts for name, facts in GPUS.items() if name.partition("-")[0] == word]
    return alike[0] if len(alike) == 1 else None


def estimate(
    weights_bytes: float, kv_bytes_per_token: float, gpu: GpuFacts, tensor_parallel: int, parameters: float = 0.0
) -> Profile:
    """The profile of a model with *weights_bytes* over all GPUs of an instance, on *tensor_parallel* of *gpu*.

    *parameters* are those that a token uses; 0: as many as the weights hold in 16 bits. ValueError names a wrong size.
    """
    for name, value in {"weights_bytes": weights_bytes, "kv_bytes_per_token": kv_bytes_per_token}.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, not {value!r}")
    if tensor_parallel < 1 or parameters < 0:
        raise ValueError(f"{tensor_parallel} GPUs cannot serve {parameters:g} parameters")
    parameters = parameters or weights_bytes / BITS_16
    flops = gpu.flops_8_bit if weights_bytes / parameters < FEWER_BITS else gpu.flops_16_bit
    bytes_per_s = tensor_parallel * gpu.bandwidth_bytes_per_s * MEMORY_EFFICIENCY
    token_s = 2.0 * parameters / (tensor_parallel * flops * COMPUTE_EFFICIENCY)
    step_s = STEP_S + weights_bytes / bytes_per_s
    return Profile(
        prefill_t0_s=step_s,
        prefill_a_s=PREFILL_S,
        prefill_b_s_per_token=token_s,
        prefill_c_s_per_token2=0.0,
        decode_a_s=step_s,
        decode_b_s_per_sequence=SEQUENCE_S + token_s,
        decode_c_s_per_token=kv_bytes_per_token / bytes_per_s,
    )
