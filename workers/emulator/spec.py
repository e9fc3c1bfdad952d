"""Specifications of emulated instances: bodies of `PUT /emulator/instances/<name>`, entries of the configuration file."""

from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from workers.vllm.spec import NAME, ServerSpec

RESERVED_NAMES = frozenset({"emulator"})

# Llama-3.1-8B on one H100, roughly: an instance of `--single` and of tests that do not care.
DEFAULT_PROFILE = Profile(
    prefill_t0_s=0.012,
    prefill_a_s=0.008,
    prefill_b_s_per_token=4.5e-5,
    prefill_c_s_per_token2=2.0e-10,
    decode_a_s=0.0085,
    decode_b_s_per_sequence=2.5e-5,
    decode_c_s_per_token=4.0e-8,
)


class SpecError(Exception):
    """A specification is wrong; the text names each wrong field."""


class InstanceSpec(ServerSpec):
    """One emulated server."""

    max_model_len: Annotated[int, Field(ge=2)] = 8192
    profile: Profile = DEFAULT_PROFILE
    front_end: FrontEnd = NO_LIMIT
    embedding_dimensions: Annotated[int, Field(ge=1, le=65_536)] = 384
    """Length of the vectors of a server that embeds."""
    num_labels: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Classes of a server that classifies; one that scores has a single one."""
    enable_auto_tool_choice: bool = False
    enable_scale_out: bool = False
    dev_mode: bool = True
    enable_lora: bool = True
    output_median_tokens: Annotated[float, Field(ge=1.0)] = 180.0
    output_sigma: Annotated[float, Field(ge=0.0, le=4.0)] = 0.9
    seed: int | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        """Refuse what vLLM refuses to start with."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if self.kv_tokens < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {self.kv_tokens} tokens (kv_blocks x block_size_tokens), fewer than max_model_len, "
                f"{self.max_model_len}"
            )
        return self

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size_tokens


def read_spec(body: object) -> InstanceSpec:
    """Return the specification in a decoded JSON *body*. Raises SpecError."""
    try:
        return InstanceSpec.model_validate(body)
    except ValidationError as error:
        parts = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()]
        raise SpecError("; ".join(parts)) from error


def check_name(name: str) -> None:
    """Raise SpecError unless *name* can stand in a path."""
    if not NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise SpecError(f"{name!r} is not an instance name: use letters, digits, - and _")
