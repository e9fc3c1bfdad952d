"""Tables of a scenario for its fleet: models, GPUs, regions, profiles and groups of instances."""

from datetime import date
from typing import Annotated, Any, Literal, Self
from zoneinfo import available_timezones

from pydantic import Field, FiniteFloat, field_validator, model_validator

from scheduling.fleet.adapter_memory import FROM_MEMORY_S, FROM_STORAGE_S, MOST_ADAPTERS
from scheduling.simulation.scenario.parts import AtLeast0, Count, Positive, ScenarioTable, Size


class Gpu(ScenarioTable):
    """Hourly prices of one GPU."""

    usd_per_hour: AtLeast0 = 0.0
    spot_usd_per_hour: AtLeast0 = 0.0
    count: dict[str, Count] = {}
    """Known GPU counts by region, for display. Places for instances are the groups'."""


class Prefill(ScenarioTable):
    t0_s: AtLeast0 = 0.0
    a_s: FiniteFloat
    b_s_per_token: AtLeast0
    c_s_per_token2: AtLeast0 = 0.0


class Decode(ScenarioTable):
    a_s: AtLeast0
    b_s_per_sequence: AtLeast0 = 0.0
    c_s_per_token: AtLeast0 = 0.0


class FrontEndOf(ScenarioTable):
    """Limits of an instance's API process; default: no known limit."""

    requests_per_s: Positive | None = None
    tokens_per_s: Positive | None = None


class ProfileOf(ScenarioTable):
    """Coefficients of a model on a GPU type at a tensor parallel degree."""

    model: str
    gpu: str
    tensor_parallel: Size = 1
    prefill: Prefill
    decode: Decode | None = None
    """Needed where the model generates."""
    front_end: FrontEndOf = FrontEndOf()

    @classmethod
    def table(cls, model: str, gpu: str, costs: Any, tensor_parallel: int = 1) -> dict[str, Any]:
        """Return the table of *costs*: a `Profile`, or a row with its coefficients and the limits of its front end."""
        parts = ("prefill", Prefill), ("decode", Decode), ("front_end", FrontEndOf)
        return {"model": model, "gpu": gpu, "tensor_parallel": tensor_parallel} | {
            part: {name: getattr(costs, f"{part}_{name}", None) for name in fields.model_fields}
            for part, fields in parts
        }


class RegionOf(ScenarioTable):
    peak_shift_h: FiniteFloat = 0.0
    """Shift of the daily peak against the clients' `peak_h`."""
    time_zone: str | None = None
    """Whose clock and weekdays forecasts follow; None: they know neither."""
    holidays: list[Annotated[date, Field(strict=False)]] = []

    @field_validator("time_zone")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in available_timezones():
            raise ValueError(f"there is no time zone {name!r}, name one such as Europe/Berlin")
        return name


class SharingOf(ScenarioTable):
    """GPU sharing between groups of the fleet: each number in a region is one swap group.

    The GPUs of `llama-east-2` are shared with the second instance in east of every `[[fleet]]` with the same `group`.
    """

    group: str
    sleep_s: AtLeast0
    wake_s: AtLeast0
    """With its weights in CPU memory."""
    reload_s: AtLeast0
    """With its weights only in storage."""
    weights_gb: AtLeast0 = 0.0


class SwapGroupOf(ScenarioTable):
    cpu_memory_gb: AtLeast0
    """In each region and for each number, for the weights of sleeping instances."""


class Delays(ScenarioTable):
    """Durations of changes in seconds. Spot and redeploying: SageServe sections 4 and 7.1; the others are our choice."""

    spot_median_s: AtLeast0 = 60.0
    spot_max_s: AtLeast0 = 300.0
    start_s: AtLeast0 = 180.0
    """From an unpaid machine until its weights begin to load."""
    local_weights_s: AtLeast0 = 600.0
    remote_weights_s: AtLeast0 = 7200.0
    wake_s: AtLeast0 = 5.0
    repair_s: AtLeast0 = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.spot_median_s > self.spot_max_s:
            raise ValueError(f"spot_median_s ({self.spot_median_s}) is more than spot_max_s ({self.spot_max_s})")
        return self


class Group(ScenarioTable):
    """Equal instances of a model, in each of some regions."""

    model: str
    regions: Annotated[list[str], Field(min_length=1)]
    gpu: str
    tensor_parallel: Size = 1
    instances: Count
    """Ready at the start, in each region."""
    spot: Count = 0
    """Lent out at the start, with this model loaded."""
    empty: Count = 0
    """Places for further instances."""
    asleep: Count = 0
    """Asleep at the start, in each region."""
    sharing: SharingOf | None = None
    """None: an instance shares no GPUs."""
    kv_tokens: Size
    """KV cache of an instance."""
    max_num_seqs: Size = 256
    max_num_batched_tokens: Size = 8192
    block_size_tokens: Size = 16
    queue: Literal["fcfs", "priority"] = "fcfs"
    """vLLM's own waiting order."""
    prefix_caching: bool = False
    max_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0
    """LoRA adapters on the GPUs of an instance at once; 0: it serves none."""
    max_cpu_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0
    """Adapters in its CPU memory, those on the GPUs included; 0: as many as on the GPUs."""
    adapter_storage_s: AtLeast0 = FROM_STORAGE_S
    """Time to bring an adapter onto the GPU that is not loaded."""
    adapter_memory_s: AtLeast0 = FROM_MEMORY_S
    """The same from CPU memory."""
    takes_all: bool = False
    """Whether the dispatcher gives it every request at once, as in the papers, or only what it has room for."""
    start_s: Positive | None = None
    """Measured time from requesting an instance to serving, machine and weights together; default: the `[delays]`."""

    reclaim_s: AtLeast0 | None = None
    """Measured median time of a reclaim from spot; default: the `[delays]`, or like a start where `start_s` is given."""
    pull_s: AtLeast0 | None = None
    """Time to pull the weights into these regions before a new machine loads them, 0 where they are; default: the
    `[delays]`."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.instances + self.spot + self.empty + self.asleep:
            raise ValueError("instances, asleep, spot and empty are all 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, or running requests would starve")
        if self.kv_tokens < self.block_size_tokens:
            raise ValueError("kv_tokens must be at least block_size_tokens")
        return self


def gpus_as_type(gpu: str, tensor_parallel: int) -> str:
    """Return the GPUs of one instance as one type, such as `4 x h100-80gb`, by which hours and dollars are counted."""
    return gpu if tensor_parallel == 1 else f"{tensor_parallel} x {gpu}"
