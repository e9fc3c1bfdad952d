"""The demo inventory: published figures with their sources, and a fleet of emulated instances made from them.

Nothing here is invented performance: a model is deployed only on GPU types for which a measured profile exists. H200
and L40S are there with memory and price, ready for a profile of your own. SLO price factors and limits are
defaults for a demo, to be edited.

Sources
- prefill and decode: fits of the Splitwise characterisation (`perf_model.csv`: Llama-2-70B, Bloom-176B; Patel et al.,
  ISCA 2024) and of the profiles published with SageServe (Llama-3.1-8B, Llama-3.2-3B). Prefill is fitted on single
  prompts of up to 8,192 tokens; decode on batches of up to 64 (Llama-2, Bloom) or 32 sequences. Errors are mean
  absolute percentage errors on configurations left out of the fit, mean of 20 draws.
- weights and KV bytes per token: the models' published shapes in 16 bits (2 x layers x KV heads x head size x 2 bytes).
- GPU memory: NVIDIA's data sheets; prices: SkyPilot's catalogue, version 8 (a snapshot of 2025-26).
"""

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from django.db import models, transaction

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.events.services import record
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    Launcher,
    Model,
    Node,
    PerformanceProfile,
    Region,
    RegionLatency,
    SloClass,
    SloKind,
)

OPERATOR = "operator"  # user name of the demo's only user; signs in by a link, has no password
GPUS_PER_NODE = 8

REGIONS = {"us-east": "US East", "us-central": "US Central", "us-west": "US West"}

LATENCIES_MS = {("us-east", "us-central"): 12.0, ("us-central", "us-west"): 20.0, ("us-east", "us-west"): 33.0}
"""One way: half of the usual round trips of 24, 40 and 66 ms between Virginia, Iowa and California."""

GPU_TYPES = {
    "a100-80gb": {
        "title": "A100 80 GB",
        "memory_bytes": 85_899_345_920,
        "on_demand_usd_per_hour": Decimal("1.35"),
        "price_source": "SkyPilot catalogue v8, Hyperstack A100-80G-PCIe; no spot price listed",
    },
    "h100-80gb": {
        "title": "H100 80 GB",
        "memory_bytes": 85_899_345_920,
        "on_demand_usd_per_hour": Decimal("2.95"),
        "spot_usd_per_hour": Decimal("1.25"),
        "price_source": "SkyPilot catalogue v8, Nebius H100-80G-SXM",
    },
    "h200-141gb": {
        "title": "H200 141 GB",
        "memory_bytes": 151_397_597_184,
        "on_demand_usd_per_hour": Decimal("3.50"),
        "spot_usd_per_hour": Decimal("1.45"),
        "price_source": "SkyPilot catalogue v8, Nebius H200-141G-SXM",
    },
    "l40s-48gb": {
        "title": "L40S 48 GB",
        "memory_bytes": 48_305_799_168,
        "on_demand_usd_per_hour": Decimal("1.5484"),
        "price_source": "SkyPilot catalogue v8, Nebius L40S-48G; no spot price listed",
    },
}

MODELS = {
    "llama-2-70b": {
        "title": "Llama 2 70B",
        "weights_bytes": 137_953_316_864,
        "kv_bytes_per_token": 327_680,
        "context_tokens": 4_096,
    },
    "bloom-176b": {
        "title": "Bloom 176B",
        "weights_bytes": 352_500_000_000,
        "kv_bytes_per_token": 4_014_080,
        "context_tokens": 2_048,
    },
    "llama-3.1-8b": {
        "title": "Llama 3.1 8B",
        "weights_bytes": 16_060_000_000,
        "kv_bytes_per_token": 131_072,
        "context_tokens": 131_072,
    },
    "llama-3.2-3b": {
        "title": "Llama 3.2 3B",
        "weights_bytes": 6_430_000_000,
        "kv_bytes_per_token": 114_688,
        "context_tokens": 131_072,
    },
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One fit: prefill (t0, a, b, c) and decode (a, b, c) in seconds and tokens; errors in percent, None if unknown."""

    model: str
    gpu_type: str
    tensor_parallel: int
    prefill: tuple[float, float, float, float]
    prefill_error_pct: float
    decode: tuple[float, float, float]
    decode_error_pct: float | None
    source: str
    front_end: tuple[float | None, float | None] = (None, None)
    """Requests and output tokens a second that its API server process carries, None where that was not measured."""

    def values(self) -> dict[str, Any]:
        t0, a, b, c = self.prefill
        decode_a, decode_b, decode_c = self.decode
        requests_per_s, tokens_per_s = self.front_end
        return {
            "prefill_t0_s": t0,
            "prefill_a_s": a,
            "prefill_b_s_per_token": b,
            "prefill_c_s_per_token2": c,
            "decode_a_s": decode_a,
            "decode_b_s_per_sequence": decode_b,
            "decode_c_s_per_token": decode_c,
            "front_end_requests_per_s": requests_per_s,
            "front_end_tokens_per_s": tokens_per_s,
            "prefill_error_pct": self.prefill_error_pct,
            "decode_error_pct": self.decode_error_pct,
            "source": self.source,
        }


SPLITWISE = "fit of Splitwise perf_model.csv (prompts up to 8192 tokens, batches up to 64)"
SPLITWISE_32 = "fit of Splitwise perf_model.csv (prompts up to 8192 tokens, batches up to 32)"
SAGESERVE = (
    "fit of SageServe's profiles (batches up to 32); cost per decoding sequence derived from end-to-end times, "
    "uncertain by 20 to 30%, decode error not held out"
)
H100_GRID = "fit of our own grid on vLLM 0.26 (lone prompts up to 12,288 tokens, batches up to 256; errors in sample)"
# fmt: off
PROFILES = (
    Measured("llama-2-70b", "a100-80gb", 2, (0.0810758, 0.03031, 0.000320354, 5.11177e-09), 6.1,
             (0.056927, 0.000491545, 0.0), 5.8, SPLITWISE_32),
    Measured("llama-2-70b", "a100-80gb", 4, (0.0636538, 0.0322506, 0.000179068, 1.15063e-08), 3.0,
             (0.04413, 0.000162603, 2.3213e-07), 2.7, SPLITWISE),
    Measured("llama-2-70b", "a100-80gb", 8, (0.0653472, 0.0411535, 9.59723e-05, 1.08803e-08), 4.5,
             (0.0444317, 0.000236599, 2.49124e-07), 2.1, SPLITWISE),
    Measured("llama-2-70b", "h100-80gb", 2, (0.0514751, 0.0107058, 0.000141495, 2.55931e-09), 3.1,
             (0.0366899, 0.000429403, 8.87993e-08), 1.5, SPLITWISE_32),
    Measured("llama-2-70b", "h100-80gb", 4, (0.0496374, 0.0158229, 8.37716e-05, 3.76592e-09), 6.7,
             (0.0291363, 0.00025136, 3.79107e-08), 2.2, SPLITWISE),
    Measured("llama-2-70b", "h100-80gb", 8, (0.0518443, 0.0341876, 3.41212e-05, 7.97229e-09), 15.3,
             (0.0297189, 0.000208438, 1.78587e-07), 2.3, SPLITWISE),
    Measured("bloom-176b", "a100-80gb", 8, (0.0, 0.0526053, 0.000225085, 2.33356e-08), 9.6,
             (0.0483651, 0.000399364, 3.22098e-07), 2.2, SPLITWISE),
    Measured("bloom-176b", "h100-80gb", 8, (0.0482844, 0.0264682, 9.14196e-05, 1.1408e-08), 5.9,
             (0.0357112, 0.000265256, 1.77803e-07), 2.3, SPLITWISE),
    Measured("llama-3.1-8b", "h100-80gb", 1, (0.0176, 0.012, 2.07e-05, 6.2e-10), 4.0,
             (0.00638, 1.78e-05, 3.14e-08), 1.5, H100_GRID, (63.0, 18_500.0)),
    Measured("llama-3.1-8b", "a100-80gb", 2, (0.0228808, 0.00379609, 4.73168e-05, 2.23414e-09), 5.8,
             (0.00844396, 2.27225e-05, 7.23735e-08), None, SAGESERVE),
    Measured("llama-3.1-8b", "a100-80gb", 4, (0.0303251, 0.0183838, 5.57297e-05, 7.87337e-10), 1.9,
             (0.00692535, 0.000202542, 6.57285e-09), None, SAGESERVE),
    Measured("llama-3.2-3b", "a100-80gb", 2, (0.0206652, 0.00428147, 3.15174e-05, 7.59365e-10), 7.2,
             (0.00533771, 3.21197e-05, 6.55544e-08), None, SAGESERVE),
    Measured("llama-3.2-3b", "a100-80gb", 4, (0.0273765, 0.00512416, 4.50251e-05, 1.09771e-09), 10.0,
             (0.005402, 0.000126259, 0.0), None, SAGESERVE),
)
# fmt: on

SLO_CLASSES = {
    # SageServe section 3.3: latencies of O(seconds); its evaluation has the 95th percentile. 200 ms a token is about reading
    # speed.
    "interactive": {
        "title": "Interactive",
        "kind": SloKind.INTERACTIVE,
        "service_tier": "priority",
        "ttft_target_ms": 1_000,
        "itl_target_ms": 200,
        "percentile": 95.0,
        "price_factor": Decimal(1),
        "priority": 0,
    },
    # SageServe section 3.3: a deadline, "e.g., 24h"; section 6.2: priority 1 at the instance.
    "non-interactive": {
        "title": "Non-interactive",
        "kind": SloKind.NON_INTERACTIVE,
        "service_tier": "flex",
        "deadline_s": 24 * 3600,
        "percentile": 95.0,
        "price_factor": Decimal("0.5"),
        "priority": 1,
    },
    "opportunistic": {
        "title": "Opportunistic",
        "kind": SloKind.OPPORTUNISTIC,
        "percentile": 95.0,
        "price_factor": Decimal("0.25"),
        "priority": 2,
    },
}


@dataclass(frozen=True, slots=True)
class DemoTenant:
    title: str
    default: str
    slo_classes: tuple[str, ...]
    max_concurrent_requests: int
    tokens_per_minute: int = 0
    operates_fleet: bool = False
    keep_prompts: bool = False


# Acme's prompts are drawn by `demo_traffic`; they are kept, so that length models that read prompts can learn.
TENANTS = {
    "operations": DemoTenant("Fleet operations", "interactive", tuple(SLO_CLASSES), 64, operates_fleet=True),
    "acme": DemoTenant("Acme Assistants", "interactive", tuple(SLO_CLASSES), 2_000, keep_prompts=True),
    "globex": DemoTenant("Globex Research", "non-interactive", ("non-interactive", "opportunistic"), 500, 5_000_000),
}


@dataclass(frozen=True, slots=True)
class DemoDeployment:
    """A model everywhere: GPU type by region (in the order of REGIONS), and how many instances at first and at most.

    Sequences at once are few, so that the demo's traffic fills an instance by day, and its bursts several.
    """

    model: str
    gpu_types: tuple[str, str, str]
    tensor_parallel: int
    instances: int
    max_instances: int
    max_num_seqs: int
    min_instances: int = 1


DEPLOYMENTS = (
    DemoDeployment("llama-2-70b", ("h100-80gb", "a100-80gb", "h100-80gb"), 4, 2, 4, 16),
    DemoDeployment("bloom-176b", ("h100-80gb", "a100-80gb", "a100-80gb"), 8, 2, 3, 32),
    DemoDeployment("llama-3.1-8b", ("a100-80gb",) * 3, 2, 3, 6, 12),
    DemoDeployment("llama-3.2-3b", ("a100-80gb",) * 3, 2, 2, 4, 12),
)


def seed(fleet: Literal["none", "emulated"] = "emulated") -> Counter[str]:
    """Create what is missing of the demo and touch nothing that is there. Returns the rows created, by kind.

    Rows are known by their names, so an operator's edits stay and a second run creates nothing.
    """
    seeder = _Seeder()
    with transaction.atomic():
        seeder.hardware_and_models()
        seeder.accounts()
        seeder.deployments()
        if fleet == "emulated":
            seeder.instances()
        if seeder.created:
            record("demo.seeded", actor="seed_demo", after=dict(seeder.created))
    return seeder.created


class _Seeder:
    def __init__(self) -> None:
        self.created: Counter[str] = Counter()

    def row(self, model: type[models.Model], values: dict[str, Any], /, **key: Any) -> Any:
        """Return the row of *model* with *key*, created from *values* after `full_clean` if it is missing."""
        existing = model._default_manager.filter(**key).first()
        if existing is not None:
            return existing
        row = model(**key, **values)
        row.full_clean()
        row.save()
        self.created[str(model._meta.verbose_name_plural)] += 1
        return row

    def hardware_and_models(self) -> None:
        for name, title in REGIONS.items():
            self.row(Region, {"title": title}, name=name)
        regions = Region.objects.in_bulk(list(REGIONS), field_name="name")
        for (origin, target), latency_ms in LATENCIES_MS.items():
            self.row(RegionLatency, {"latency_ms": latency_ms}, origin=regions[origin], target=regions[target])
        for name, values in GPU_TYPES.items():
            self.row(GpuType, values, name=name)
        for name, values in MODELS.items():
            self.row(Model, values, name=name)
        for measured in PROFILES:
            self.row(
                PerformanceProfile,
                measured.values(),
                model=Model.objects.get(name=measured.model),
                gpu_type=GpuType.objects.get(name=measured.gpu_type),
                tensor_parallel=measured.tensor_parallel,
            )
        for (region, gpu_type), gpus in self._gpus_at_most().items():
            for number in range(1, -(-gpus // GPUS_PER_NODE) + 1):
                self.row(
                    Node,
                    {
                        "region": Region.objects.get(name=region),
                        "gpu_type": GpuType.objects.get(name=gpu_type),
                        "gpu_count": GPUS_PER_NODE,
                    },
                    name=f"{region}-{gpu_type.partition('-')[0]}-{number}",
                )

    def accounts(self) -> None:
        for name, values in SLO_CLASSES.items():
            self.row(SloClass, values, name=name)
        classes = SloClass.objects.in_bulk(list(SLO_CLASSES), field_name="name")
        for name, tenant in TENANTS.items():
            is_new = not Tenant.objects.filter(name=name).exists()
            row = self.row(
                Tenant,
                {
                    "title": tenant.title,
                    "operates_fleet": tenant.operates_fleet,
                    "keep_prompts": tenant.keep_prompts,
                    "default_slo_class": classes[tenant.default],
                    "max_concurrent_requests": tenant.max_concurrent_requests,
                    "tokens_per_minute": tenant.tokens_per_minute,
                },
                name=name,
            )
            if is_new:
                row.slo_classes.set(classes[name] for name in tenant.slo_classes)
        user = User.objects.filter(username=OPERATOR).first()
        if user is None:
            user = User(username=OPERATOR)
            user.set_unusable_password()
            user.save()
            self.created["users"] += 1
            Membership.objects.create(user=user, tenant=Tenant.objects.get(name="operations"), role=Role.ADMIN)

    def deployments(self) -> None:
        for demo in DEPLOYMENTS:
            for region, gpu_type in zip(REGIONS, demo.gpu_types, strict=True):
                self.row(
                    Deployment,
                    {
                        "tensor_parallel": demo.tensor_parallel,
                        "min_instances": demo.min_instances,
                        "max_instances": demo.max_instances,
                        "max_num_seqs": demo.max_num_seqs,
                    },
                    model=Model.objects.get(name=demo.model),
                    region=Region.objects.get(name=region),
                    gpu_type=GpuType.objects.get(name=gpu_type),
                )

    def instances(self) -> None:
        for demo in DEPLOYMENTS:
            for region, gpu_type in zip(REGIONS, demo.gpu_types, strict=True):
                deployment = Deployment.objects.get(
                    model__name=demo.model, region__name=region, gpu_type__name=gpu_type
                )
                for number in range(1, demo.instances + 1):
                    name = f"{demo.model.replace('.', '-')}-{region}-{number}"
                    if Instance.objects.filter(name=name).exists():
                        continue
                    values = {
                        "deployment": deployment,
                        "launcher": Launcher.EMULATED,
                        "node": self._free_node(deployment),
                    }
                    self.row(Instance, values, name=name)

    @staticmethod
    def _free_node(deployment: Deployment) -> Node | None:
        """Return the first node with enough free GPUs; None (not placed) if operators use them otherwise."""
        nodes = Node.objects.filter(region=deployment.region, gpu_type=deployment.gpu_type, active=True)
        return next((node for node in nodes if node.free_gpus() >= deployment.tensor_parallel), None)

    @staticmethod
    def _gpus_at_most() -> dict[tuple[str, str], int]:
        """Return GPUs by (region, GPU type) that let every demo deployment grow to its maximum."""
        gpus: Counter[tuple[str, str]] = Counter()
        for demo in DEPLOYMENTS:
            for region, gpu_type in zip(REGIONS, demo.gpu_types, strict=True):
                gpus[region, gpu_type] += demo.max_instances * demo.tensor_parallel
        return gpus
