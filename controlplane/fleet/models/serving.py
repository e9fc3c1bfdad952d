"""Models, their performance profiles and deployments."""

from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from controlplane.fleet.models.hardware import Device, GpuType, Region
from controlplane.fleet.validators import (
    validate_environment,
    validate_model_name,
    validate_model_source,
    validate_token,
    validate_vllm_args,
)
from scheduling.fleet.adapter_memory import MOST_ADAPTERS
from scheduling.fleet.kv_cost import MAX_OFFLOAD_GIB, USUAL_RESTORE_S
from scheduling.fleet.profile_estimate import link_bytes_per_s
from scheduling.knob import Declared
from scheduling.model_task import Task
from scheduling.policy import COLUMNS, LIVE_CHOICES, EndpointPolicy

if TYPE_CHECKING:
    from scheduling.fleet.front_end import FrontEnd
    from scheduling.fleet.profile import Profile

NO_LIMIT_KNOWN = "What the API server process of an instance carries. Empty: no limit is known."


class ModelTask(models.TextChoices):
    """Tasks of models: `scheduling.model_task.Task`."""

    GENERATE = Task.GENERATE.value, "Generate text"
    TRANSCRIPTION = Task.TRANSCRIPTION.value, "Transcribe speech"
    EMBED = Task.EMBED.value, "Embed texts"
    TOKEN_EMBED = Task.TOKEN_EMBED.value, "Embed tokens"
    CLASSIFY = Task.CLASSIFY.value, "Classify texts"
    TOKEN_CLASSIFY = Task.TOKEN_CLASSIFY.value, "Classify tokens"
    SCORE = Task.SCORE.value, "Score and rerank pairs of texts"


class Model(models.Model):
    """A language model that tenants can ask for by name."""

    name = models.CharField(
        max_length=160,
        unique=True,
        validators=[validate_model_name],
        help_text="The name in requests, such as llama-3.1-8b.",
    )
    title = models.CharField(max_length=120)
    source = models.CharField(
        max_length=255,
        blank=True,
        validators=[validate_model_source],
        help_text="Folder or repository that vLLM loads; empty for emulated models.",
    )
    weights_bytes = models.PositiveBigIntegerField(
        "weights (bytes)",
        validators=[MinValueValidator(1)],
        help_text="Memory of the weights over all GPUs of an instance, in bytes.",
    )
    kv_bytes_per_token = models.PositiveBigIntegerField(
        "KV cache (bytes per token)",
        validators=[MinValueValidator(1)],
        help_text="KV cache of one token over all GPUs of an instance, in bytes.",
    )
    context_tokens = models.PositiveIntegerField(
        "context (tokens)",
        validators=[MinValueValidator(1)],
        help_text="Longest prompt with output (vLLM's --max-model-len), in tokens.",
    )
    architecture = models.CharField(
        max_length=80,
        blank=True,
        help_text="Models of one architecture and size differ in their weights alone, so that an instance changes from one "
        "to another in less time. Empty: it has none in common with another.",
    )
    task = models.CharField(
        max_length=16,
        choices=ModelTask.choices,
        default=ModelTask.GENERATE,
        help_text="What its servers do, by vLLM's names: it decides which calls it serves.",
        error_messages={"invalid_choice": f"%(value)r is no task; there are: {', '.join(Task)}."},
    )
    fallback = models.ForeignKey(
        "self",
        verbose_name="fallback model",
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="Serves a request while no instance of this model does, or when its instances failed it before its first "
        "token; empty: none.",
    )
    fallback_wait_s = models.FloatField(
        "fallback after (s)",
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0)],
        help_text="The fallback also serves a request that would wait longer, in seconds; empty: however long it waits.",
    )
    shard = models.PositiveSmallIntegerField(
        default=1,
        validators=[MinValueValidator(1)],
        help_text="Number of the shard of models whose dispatcher decides about its requests.",
    )
    weights_in = models.ManyToManyField(
        Region,
        blank=True,
        related_name="+",
        help_text="Regions that have its weights; a start elsewhere takes the time of a pull. Empty: not known, near.",
    )
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def pools(self) -> bool:
        """Whether its requests are prefill alone."""
        return Task(self.task).pools

    def out_of_use(self) -> str:
        """Return that it is retired and how it is set active again; "" where it is not."""
        how = f'`PATCH /api/inventory` with `{{"models": [{{"name": "{self.name}", "active": true}}]}}`'
        return "" if self.active else f"{self} is retired. Set it active again: {how}."

    def clean(self) -> None:
        if Adapter.objects.filter(name=self.name).exists():
            raise ValidationError({"name": f"{self.name} is the name of an adapter."})
        if self.fallback is None:
            if self.fallback_wait_s is not None:
                raise ValidationError({"fallback_wait_s": "Name a fallback model."})
        elif self.fallback.name == self.name:
            raise ValidationError({"fallback": "A model is not its own fallback."})
        elif self.fallback.task != self.task:
            raise ValidationError(
                {
                    "fallback": f"The task of {self.fallback} is {self.fallback.task}, that of {self.name} is {self.task}."
                }
            )


class WeightedTarget(models.Model):
    """A share of the requests that ask for a public name: a canary of a new version, or an A/B test.

    All rows of one *name* together share its requests. A model or adapter may have that name too; its requests are shared
    then, and as a target it is the model itself.
    """

    name = models.CharField(
        max_length=160,
        validators=[validate_model_name],
        help_text="The public name in requests; all its rows share them.",
    )
    target = models.CharField(max_length=160, help_text="The model or adapter that serves this share.")
    weight = models.FloatField(
        default=1.0, validators=[MinValueValidator(0.0)], help_text="Its share is its weight over those of all rows."
    )
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name", "-weight", "target"]
        constraints = [models.UniqueConstraint(fields=["name", "target"], name="one_weight_per_name_and_target")]

    def __str__(self) -> str:
        return f"{self.name} to {self.target}"

    def clean(self) -> None:
        if self.weight is not None and not isfinite(self.weight):
            raise ValidationError({"weight": "A weight is a number."})
        if (task := self._task(self.target)) is None:
            raise ValidationError({"target": f"There is no model or adapter {self.target!r}."})
        own = Adapter.objects.exclude(tenant=None).filter(name__in=[self.name, self.target]).first()
        if own is not None:
            raise ValidationError(
                {"target": f"{own} is an adapter of {own.tenant} alone; targets are for all tenants."}
            )
        for other in WeightedTarget.objects.filter(name=self.name).exclude(pk=self.pk):
            if other.target == self.target:
                raise ValidationError({"target": f"{self.name} has this target already: change that one."})
            if (known := self._task(other.target)) not in (None, task):
                raise ValidationError({"target": f"Its task is {task}, and that of {other.target} is {known}."})

    @staticmethod
    def _task(name: str) -> str | None:
        """Return the task of the model or adapter called *name*; None if there is none."""
        tasks = Model.objects.filter(Q(name=name) | Q(adapters__name=name)).values_list("task", flat=True)
        return tasks.first()


class Adapter(models.Model):
    """A LoRA adapter, which tenants ask for by its name as for a model; instances of its base model serve it."""

    name = models.CharField(
        max_length=160,
        unique=True,
        validators=[validate_model_name],
        help_text="The name in requests, such as llama-3.1-8b-sql; no model has it.",
    )
    base = models.ForeignKey(
        Model, verbose_name="base model", on_delete=models.CASCADE, related_name="adapters", help_text="What it adapts."
    )
    source = models.CharField(
        max_length=255,
        validators=[validate_model_source],
        help_text="Folder or repository that vLLM loads, the same on every node.",
    )
    rank = models.PositiveSmallIntegerField(
        default=8,
        validators=[MinValueValidator(1), MaxValueValidator(512)],
        help_text="Its LoRA rank; servers are started with the largest of their model (vLLM's --max-lora-rank).",
    )
    tenant = models.ForeignKey(
        "accounts.Tenant",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="adapters",
        help_text="Its keys alone see it and may ask for it; for others it does not exist. Empty: of all tenants.",
    )
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if Model.objects.filter(name=self.name).exists():
            raise ValidationError({"name": f"{self.name} is the name of a model."})
        shared = (
            WeightedTarget.objects.filter(Q(target=self.name) | Q(name=self.name)).first() if self.tenant_id else None
        )
        if shared is not None:
            raise ValidationError({"tenant": f"{shared} is for all tenants: it cannot be of one."})
        if self.base_id and self.base.pools:
            raise ValidationError({"base": f"{self.base} does not generate text, and adapters of it are not served."})


class PerformanceProfile(models.Model):
    """Duration of an engine step for (model, GPU type, tensor parallel degree).

    `t_prefill = max(t0, a + b·p + c·p²)` and `t_decode = a + b·batch + c·context`, in seconds and tokens (DESIGN 6).
    """

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="profiles")
    gpu_type = models.ForeignKey(GpuType, verbose_name="GPU type", on_delete=models.PROTECT, related_name="profiles")
    tensor_parallel = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1)])
    prefill_t0_s = models.FloatField("t0 (s)", default=0.0, validators=[MinValueValidator(0.0)])
    prefill_a_s = models.FloatField("a (s)")
    prefill_b_s_per_token = models.FloatField("b (s per token)", validators=[MinValueValidator(0.0)])
    prefill_c_s_per_token2 = models.FloatField("c (s per token²)", default=0.0, validators=[MinValueValidator(0.0)])
    decode_a_s = models.FloatField("a (s)", validators=[MinValueValidator(0.0)])
    decode_b_s_per_sequence = models.FloatField("b (s per sequence)", default=0.0, validators=[MinValueValidator(0.0)])
    decode_c_s_per_token = models.FloatField(
        "c (s per context token)", default=0.0, validators=[MinValueValidator(0.0)]
    )
    front_end_requests_per_s = models.FloatField(
        "requests per s", null=True, blank=True, validators=[MinValueValidator(1e-3)], help_text=NO_LIMIT_KNOWN
    )
    front_end_tokens_per_s = models.FloatField(
        "output tokens per s", null=True, blank=True, validators=[MinValueValidator(1e-3)], help_text=NO_LIMIT_KNOWN
    )
    source = models.CharField(max_length=255)
    estimated = models.BooleanField(
        default=False,
        help_text="From sizes and data sheets, not measured; `simulate --fit` with `--write` measures it.",
    )
    prefill_error_pct = models.FloatField(
        "prefill error (%)", null=True, blank=True, help_text="Mean absolute error on held-out settings."
    )
    decode_error_pct = models.FloatField(
        "decode error (%)", null=True, blank=True, help_text="Mean absolute error on held-out settings."
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["model__name", "gpu_type__name", "tensor_parallel"]
        constraints = [
            models.UniqueConstraint(fields=["model", "gpu_type", "tensor_parallel"], name="one_profile_per_setting")
        ]

    def __str__(self) -> str:
        return f"{self.model} on {self.tensor_parallel} x {self.gpu_type}"

    def coefficients(self) -> "Profile":
        """Coefficients for simulator and emulator. Raises ValueError naming a coefficient that is impossible."""
        from scheduling.fleet.profile import Profile  # brings Numba, which few commands need

        return Profile(**{field.name: getattr(self, field.name) for field in fields(Profile)})

    def front_end(self) -> "FrontEnd":
        """Limits of the API process, for simulator and emulator."""
        from scheduling.fleet.front_end import FrontEnd

        known = {field.name: getattr(self, f"front_end_{field.name}") for field in fields(FrontEnd)}
        return FrontEnd(**{name: value for name, value in known.items() if value is not None})

    def clean(self) -> None:
        same = PerformanceProfile.objects.filter(
            model=self.model_id, gpu_type=self.gpu_type_id, tensor_parallel=self.tensor_parallel
        ).exclude(pk=self.pk)
        if same.exists():
            raise ValidationError(
                {"tensor_parallel": "There is a profile for this model, GPU type and tensor parallel degree already."}
            )
        if None not in (self.prefill_t0_s, self.prefill_a_s) and self.prefill_t0_s == 0 and self.prefill_a_s <= 0:
            raise ValidationError({"prefill_a_s": "With no floor (t0), the constant of a prefill step is above 0."})
        if self.decode_a_s is not None and self.decode_a_s <= 0:
            raise ValidationError({"decode_a_s": "The constant of a decode step is above 0 seconds."})


NOT_LIVE = {
    "sjf": "sjf goes by the output that will really come, which only a simulation knows: take ssjf",
    "shortest": "by shortest a long request could wait for ever: take ssjf, with a large stretch if need be",
}
"""Why a deployment cannot have an ordering that the simulator has."""


def _column(declared: Declared) -> Any:
    """Return the column of a knob of an endpoint's policy."""
    knob, column = declared.knob, declared.knob.column
    assert column is not None
    options: dict[str, Any] = {"help_text": knob.help, "default": column.default}
    if knob.choices is not None:
        choices = LIVE_CHOICES[column.name]
        wrong = f"%(value)r is not one of {', '.join(choices)}."
        if refused := [NOT_LIVE[name] for name in knob.choices if name not in choices]:
            wrong = f"%(value)r is no ordering of a deployment ({'; '.join(refused)})."
        options |= {"max_length": 32, "choices": list(choices.items()), "error_messages": {"invalid_choice": wrong}}
        return models.CharField(**options)
    if declared.type is bool:
        return models.BooleanField(knob.title, **options)
    limits: list[Any] = [] if column.le is None else [MaxValueValidator(column.le)]
    if declared.type is float:
        return models.FloatField(validators=[MinValueValidator(knob.ge or 0.0), *limits], **options)
    if knob.title:
        options["verbose_name"] = knob.title
    if declared.optional and column.default is None:
        options |= {"null": True, "blank": True}
    return models.PositiveIntegerField(validators=limits, **options)


class EndpointPolicyColumns(models.Model):
    """Knobs of `scheduling.policy.EndpointPolicy` of a live deployment, as columns."""

    class Meta:
        abstract = True


for _name, _declared in COLUMNS.items():
    EndpointPolicyColumns.add_to_class(_name, _column(_declared))


class Deployment(EndpointPolicyColumns):
    """Deployment of a model in a region on a GPU type: engine, bounds and policy of its instances."""

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="deployments")
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="deployments")
    gpu_type = models.ForeignKey(GpuType, verbose_name="GPU type", on_delete=models.PROTECT, related_name="deployments")
    tensor_parallel = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1)])
    min_instances = models.PositiveSmallIntegerField(default=1)
    max_instances = models.PositiveSmallIntegerField(default=4)
    max_num_seqs = models.PositiveSmallIntegerField(
        "sequences at once",
        default=256,
        validators=[MinValueValidator(1)],
        help_text="vLLM's --max-num-seqs: requests that run at once.",
    )
    max_num_batched_tokens = models.PositiveIntegerField(
        "tokens per step",
        default=8192,
        validators=[MinValueValidator(1)],
        help_text="vLLM's --max-num-batched-tokens: tokens a step.",
    )
    gpu_memory_utilization = models.FloatField(
        "GPU memory utilisation",
        default=0.9,
        validators=[MinValueValidator(0.1), MaxValueValidator(1.0)],
        help_text="vLLM's flag of that name.",
    )
    max_loras = models.PositiveSmallIntegerField(
        "adapters on the GPU",
        default=0,
        validators=[MaxValueValidator(MOST_ADAPTERS)],
        help_text="vLLM's --max-loras: LoRA adapters that one step may use; 0: no adapter is served.",
    )
    max_cpu_loras = models.PositiveSmallIntegerField(
        "adapters in memory",
        default=0,
        validators=[MaxValueValidator(MOST_ADAPTERS)],
        help_text="vLLM's --max-cpu-loras: adapters in CPU memory, those on the GPU included; 0: as many as on the GPU.",
    )
    kv_offload_gib = models.FloatField(
        "KV in CPU memory (GiB)",
        default=0.0,
        validators=[MinValueValidator(0.0), MaxValueValidator(MAX_OFFLOAD_GIB)],
        help_text="vLLM's --kv-offloading-size: CPU memory of an instance for KV that leaves its GPUs; 0: none.",
    )
    vllm_args = models.CharField(
        "further vLLM flags",
        max_length=500,
        blank=True,
        validators=[validate_vllm_args],
        help_text="For the process launcher, such as --enable-sleep-mode --kv-cache-dtype fp8.",
    )
    environment = models.JSONField(
        default=dict,
        blank=True,
        validators=[validate_environment],
        help_text='Further environment variables of the server, such as {"VLLM_CPU_KVCACHE_SPACE": "4"}.',
    )
    secrets = models.JSONField(
        default=dict,
        blank=True,
        validators=[validate_environment],
        help_text='Environment variables whose values are not shown again, such as {"HF_TOKEN": "hf_..."}.',
    )
    api_key = models.CharField(
        "API key",
        max_length=255,
        blank=True,
        validators=[validate_token],
        help_text="The token that its servers ask for (vLLM's --api-key); not shown again.",
    )
    active = models.BooleanField(default=True)

    class Meta:
        ordering = ["model__name", "region__name", "gpu_type__name"]
        constraints = [
            models.UniqueConstraint(fields=["model", "region", "gpu_type"], name="one_deployment_per_model_region_gpu"),
            models.CheckConstraint(
                condition=Q(max_instances__gte=F("min_instances")), name="max_instances_not_below_min"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} in {self.region} on {self.gpu_type}"

    def out_of_use(self) -> str:
        """Return that it is undeployed or its model retired, and how it is set active again; "" where neither is so."""
        if not self.model.active:
            more = "" if self.active else ", then its deployment"
            return f"{self.model.out_of_use().rstrip('.')}{more}."
        if self.active:
            return ""
        return f"{self} is undeployed. Set it active again in a fleet file or by `PATCH /api/inventory`."

    @property
    def longest_request_tokens(self) -> int:
        """Tokens of the longest request, for the simulator: one to a pooling model has many inputs, each of a context, and
        a sound is cut into clips.
        """
        context = self.model.context_tokens
        return context if self.model.task == ModelTask.GENERATE else max(context, self.expected_kv_tokens)

    @property
    def expected_kv_tokens(self) -> int:
        """Tokens that one instance's KV cache should hold: GPU memory x TP x utilisation, less weights.

        An estimate from above: activations and CUDA graphs take some too. A living instance reports its own figure.
        """
        memory_bytes = self.gpu_type.memory_bytes * self.tensor_parallel * self.gpu_memory_utilization
        return int((memory_bytes - self.model.weights_bytes) // self.model.kv_bytes_per_token)

    @property
    def emulated_with_prefix_cache(self) -> bool:
        """Whether its emulated servers cache prefixes, as vLLM's do: only where something needs it."""
        return self.policy().follow_kv_events or self.kv_offload_gib > 0

    def offload_of(self, gib: float) -> tuple[int, float, float]:
        """Return the KV tokens that fit into *gib* of CPU memory, and the seconds of a restore: constant, and by token."""
        if not gib:
            return 0, 0.0, 0.0
        token_bytes, bytes_per_s = self.model.kv_bytes_per_token, link_bytes_per_s(self.gpu_type.name)
        return int(gib * 2**30 // token_bytes), USUAL_RESTORE_S, token_bytes / (bytes_per_s * self.tensor_parallel)

    @property
    def scheduling_policy(self) -> Literal["fcfs", "priority"]:
        """vLLM's --scheduling-policy: by arrival, or by the priority that comes with each request."""
        return "fcfs" if self.policy().ordering == "fcfs" else "priority"

    def policy(self) -> EndpointPolicy:
        """The knobs that its columns hold; the others have their defaults."""
        return EndpointPolicy(**{declared.name: getattr(self, name) for name, declared in COLUMNS.items()})

    @property
    def lora_rank(self) -> int:
        """Largest rank of the adapters that its servers load; 0 where they load none."""
        if not self.max_loras:
            return 0
        ranks = Adapter.objects.filter(base=self.model_id, active=True).values_list("rank", flat=True)
        return max(ranks, default=8)

    def profile(self) -> PerformanceProfile | None:
        """The measured coefficients for this model on these GPUs, if there are any."""
        return PerformanceProfile.objects.filter(
            model=self.model_id, gpu_type=self.gpu_type_id, tensor_parallel=self.tensor_parallel
        ).first()

    def clean(self) -> None:
        errors = {}
        if None not in (self.min_instances, self.max_instances) and self.min_instances > self.max_instances:
            errors["max_instances"] = f"Not below the minimum of {self.min_instances} instances."
        if None not in (self.max_loras, self.max_cpu_loras) and 0 < self.max_cpu_loras < self.max_loras:
            errors["max_cpu_loras"] = f"Not below the {self.max_loras} adapters on the GPU, which are in memory too."
        if self.kv_offload_gib and self.gpu_type_id and self.gpu_type.device == Device.CPU:
            errors["kv_offload_gib"] = "vLLM offloads KV from GPUs only."
        same = Deployment.objects.filter(model=self.model_id, region=self.region_id, gpu_type=self.gpu_type_id)
        if (other := same.exclude(pk=self.pk).first()) is not None:
            text = "This model is deployed in this region on this GPU type already."
            errors["gpu_type"] = other.out_of_use() or text
        if self.region_id and self.gpu_type_id and self.tensor_parallel and "gpu_type" not in errors:
            errors.update(self._errors_of_nodes())
        if self.model_id and self.gpu_type_id and self.tensor_parallel and self.gpu_memory_utilization:
            errors.update(self._errors_of_memory())
        if not errors and self.vllm_args:
            errors.update(self._errors_of_arguments())
        if errors:
            raise ValidationError(errors)

    def _errors_of_nodes(self) -> dict[str, str]:
        """The region's nodes must be able to hold the minimum. Without nodes of the type, hardware is not kept here."""
        nodes = Region.objects.filter(pk=self.region_id, nodes__gpu_type=self.gpu_type_id, nodes__active=True)
        counts = list(nodes.values_list("nodes__gpu_count", flat=True))
        if not counts:
            return {}
        if self.tensor_parallel > max(counts):
            return {"tensor_parallel": f"No node of this region and GPU type has more than {max(counts)} GPUs."}
        places = sum(count // self.tensor_parallel for count in counts)
        if self.min_instances is not None and self.min_instances > places:
            return {
                "min_instances": f"The region's nodes of this GPU type hold {places} instances of "
                f"{self.tensor_parallel} GPUs at most."
            }
        return {}

    def _errors_of_arguments(self) -> dict[str, str]:
        """vLLM's own parser is asked, which takes seconds, when something that it reads has changed."""
        from controlplane.fleet.lifecycle.launching import arguments_problem

        held = Deployment.objects.filter(pk=self.pk).values_list("vllm_args", "environment").first()
        if held == (self.vllm_args, self.environment):
            return {}
        problem = arguments_problem(self)
        return {"vllm_args": f"vLLM does not take this: {problem}."} if problem else {}

    def _errors_of_memory(self) -> dict[str, str]:
        """As vLLM does at its start: the KV cache must hold one request of full context."""
        tokens = self.expected_kv_tokens
        if tokens >= self.model.context_tokens:
            return {}
        memory_gb = self.gpu_type.memory_bytes * self.tensor_parallel * self.gpu_memory_utilization / 1e9
        left = f"room for {tokens:,} tokens of KV cache" if tokens > 0 else "no room for a KV cache"
        return {
            "tensor_parallel": f"{self.tensor_parallel} x {self.gpu_type} at {self.gpu_memory_utilization:g} give "
            f"{memory_gb:.1f} GB; the weights take {self.model.weights_bytes / 1e9:.1f} GB, which leaves {left}, and "
            f"one request may need {self.model.context_tokens:,}. Use more GPUs or a higher memory utilisation."
        }
