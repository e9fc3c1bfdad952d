"""Nodes, the instances on their GPUs, and commands for instances."""

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce
from django.utils import timezone

from controlplane.fleet import validators
from controlplane.fleet.lifecycle.states import AWAKE, PRESENT, STARTING, InstanceState
from controlplane.fleet.models.hardware import GpuType, Region
from controlplane.fleet.models.serving import Deployment
from controlplane.fleet.models.swaps import SwapGroup, Tier
from controlplane.fleet.validators import validate_base_url, validate_kv_events


def gpus_of(path: str = "") -> Coalesce:
    """Return the GPUs of the instances at *path*: those their servers were started with, else their deployments'."""
    started = Cast(KeyTextTransform("tensor_parallel", f"{path}launched_with"), models.IntegerField())
    return Coalesce(started, F(f"{path}deployment__tensor_parallel"), output_field=models.IntegerField())


def _counted_once(instances: "QuerySet[Instance]") -> "QuerySet[Instance]":
    """Narrow to *instances* that are not stopped. Members of a swap group share their GPUs, so only the oldest counts; of a
    redeployment, the donated instance counts until it has stopped.
    """
    living = Instance.objects.order_by().exclude(state=InstanceState.STOPPED)
    older = living.filter(swap_group=OuterRef("swap_group"), pk__lt=OuterRef("pk"))
    waits = Q(takes_over__isnull=False) & ~Q(takes_over__state=InstanceState.STOPPED)
    return instances.exclude(state=InstanceState.STOPPED).exclude(waits).exclude(Exists(older))


class NodeQuerySet(models.QuerySet["Node"]):
    def with_gpus_used(self) -> "NodeQuerySet":
        """Annotate `gpus_used`, GPUs that instances which are not stopped have (shared ones count once), and
        `gpus_cordoned`.
        """
        here = _counted_once(Instance.objects.order_by().filter(node=OuterRef("pk")))
        used = here.values("node").annotate(gpus=Sum(gpus_of())).values("gpus")
        cordoned = Gpu.objects.order_by().filter(node=OuterRef("pk")).exclude(cordoned="").values("node")
        return self.annotate(
            gpus_used=Coalesce(Subquery(used, output_field=models.IntegerField()), 0),
            gpus_cordoned=Coalesce(Subquery(cordoned.annotate(count=Count("pk")).values("count")), 0),
        )


class Node(models.Model):
    """A machine in a region with GPUs of one type."""

    name = models.SlugField(max_length=63, unique=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="nodes")
    gpu_type = models.ForeignKey(GpuType, verbose_name="GPU type", on_delete=models.PROTECT, related_name="nodes")
    gpu_count = models.PositiveSmallIntegerField(
        "GPUs", validators=[MinValueValidator(1)], help_text="GPUs of the node; of CPUs, instances at one time."
    )
    address = models.CharField(
        max_length=255,
        default="127.0.0.1",
        validators=[validators.validate_host],
        help_text="Host name or IP address of its instances.",
    )
    active = models.BooleanField(default=True)
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who cordoned it, and why: nothing is started there until an operator uncordons it. Empty: nobody.",
    )

    host = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Host of its agent, the worker on its queue; empty: none was ever started.",
    )
    reported_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="When its GPUs and its disk were last looked at."
    )
    ray = models.JSONField(
        default=dict,
        blank=True,
        editable=False,
        help_text="Of a node of a Ray cluster: its machines and placement groups, as Ray describes them.",
    )

    objects = NodeQuerySet.as_manager()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def launcher(self, usual: str) -> str:
        """Return *usual*, but of vLLM processes the one that starts them here: Ray, or the node's agent."""
        if usual not in OF_VLLM:
            return usual
        return Launcher.RAY if self.ray else Launcher.PROCESS

    def free_gpus(self, without: "Instance | None" = None) -> int:
        """Return free GPUs that are not cordoned; stopped instances and *without*, with its swap group, do not count.

        A failed instance claims its GPUs for its next start, but none on top of the cordoned ones.
        """
        instances = self.instances.all()
        if without is not None:
            instances = instances.exclude(pk=without.pk)
            if without.swap_group_id is not None:
                instances = instances.exclude(swap_group=without.swap_group_id)
            if without.takes_over_id is not None:
                instances = instances.exclude(pk=without.takes_over_id)
        failed = Q(state=InstanceState.FAILED)
        used = _counted_once(instances).aggregate(
            failed=Sum(gpus_of(), filter=failed), others=Sum(gpus_of(), filter=~failed)
        )
        return self.gpu_count - (used["others"] or 0) - max(used["failed"] or 0, len(self.cordoned_gpus()))

    def cordoned_gpus(self) -> set[str]:
        """Return the names of its cordoned GPUs, without those whose servers run on: these count as used."""
        cordoned = {gpu.name for gpu in self.gpus.all() if gpu.cordoned}
        if cordoned:
            ended = (InstanceState.STOPPED, InstanceState.FAILED)
            cordoned.difference_update(*self.instances.exclude(state__in=ended).values_list("gpus", flat=True))
        return cordoned

    def clean(self) -> None:
        if not self.pk:
            return
        running = self.instances.exclude(state=InstanceState.STOPPED)
        used = _counted_once(self.instances.all()).aggregate(gpus=Sum(gpus_of()))["gpus"] or 0
        if self.gpu_count is not None and used > self.gpu_count:
            raise ValidationError({"gpu_count": f"Instances on this node use {used} GPUs."})
        for field in ("region", "gpu_type"):
            value = getattr(self, f"{field}_id")
            if running.exclude(**{f"deployment__{field}": value}).exists():
                raise ValidationError({field: "Instances on this node belong to deployments with another one."})


class Gpu(models.Model):
    """A GPU of a node that the node's agent, or the end of an instance there, has named."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="gpus")
    name = models.CharField(max_length=80, help_text="As in CUDA_VISIBLE_DEVICES.")
    address = models.CharField(max_length=32, blank=True, help_text="On the PCI bus, by which the driver names it.")
    failed_starts = models.JSONField(
        default=dict, help_text="Last errors of starts that failed on it, by model; empty once a start succeeds."
    )
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        help_text="Who cordoned it, and why: no instance gets it until an operator uncordons it. Empty: nobody.",
    )

    class Meta:
        ordering = ["node__name", "name"]
        constraints = [models.UniqueConstraint(fields=["node", "name"], name="one_row_per_gpu")]

    def __str__(self) -> str:
        return f"GPU {self.name} of {self.node}"


class StockState(models.TextChoices):
    MISSING = "missing", "Missing"
    PULLING = "pulling", "Pulling"
    PRESENT = "present", "Present"
    FAILED = "failed", "Pull failed"


class Stock(models.Model):
    """Weights of a model or adapter that is deployed for the GPUs of a node, and whether they are on its disk."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="stock")
    name = models.CharField(max_length=160, help_text="The model or adapter.")
    source = models.CharField(max_length=255, help_text="Folder or repository that vLLM loads.")
    state = models.CharField(max_length=16, choices=StockState.choices, default=StockState.MISSING)
    bytes = models.PositiveBigIntegerField(default=0, help_text="On the disk, in bytes.")
    error = models.CharField(max_length=400, blank=True, help_text="Why the last pull failed.")
    changed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["node__name", "name"]
        constraints = [models.UniqueConstraint(fields=["node", "name"], name="one_row_per_stock")]

    def __str__(self) -> str:
        return f"{self.name} on {self.node}"


class Launcher(models.TextChoices):
    """Starter of the server behind an instance."""

    EMULATED = "emulated", "Emulated fleet"
    PROCESS = "process", "vLLM process on the node"
    RAY = "ray", "vLLM process through Ray"
    EXTERNAL = "external", "Started elsewhere"


OF_VLLM = (Launcher.PROCESS, Launcher.RAY)
"""Launchers of real vLLM servers."""


class InstanceQuerySet(models.QuerySet["Instance"]):
    def launched(self) -> "InstanceQuerySet":
        """Instances that Pilothouse starts and stops."""
        return self.exclude(launcher=Launcher.EXTERNAL)

    def present(self) -> "InstanceQuerySet":
        """Instances that serve or soon will, including by a swap on shared GPUs; targets and bounds count them."""
        sharing = Q(swap_group__isnull=False, held="") & ~Q(state=InstanceState.FAILED)
        return self.filter(Q(state__in=PRESENT) | sharing).exclude(pk__in=self.model.objects.cancelled().values("pk"))

    def cancelled(self) -> "InstanceQuerySet":
        """Instances that are starting and to be stopped: they hold their GPUs until they are."""
        stops = InstanceCommand.objects.open().filter(verb=CommandVerb.STOP)
        return self.filter(state__in=STARTING, pk__in=stops.values("instance"))


class Instance(models.Model):
    """One serving replica of a model: a vLLM server, real or emulated."""

    name = models.SlugField(max_length=80, unique=True)
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="instances")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, null=True, blank=True, related_name="instances")
    launcher = models.CharField(max_length=16, choices=Launcher.choices, default=Launcher.EXTERNAL)
    url = models.CharField(
        "URL",
        max_length=255,
        blank=True,
        validators=[validate_base_url],
        help_text="Base address without /v1, such as http://10.0.0.7:8000; launchers fill it in.",
    )
    kv_events = models.CharField(
        "KV events",
        max_length=255,
        blank=True,
        validators=[validate_kv_events],
        help_text="Address of its KV events, and that of their replay after a blank, such as tcp://10.0.0.7:5557 "
        "tcp://10.0.0.7:5558; empty: the server says it (GET /kv_event_sources).",
    )
    state = models.CharField(
        max_length=16, choices=InstanceState.choices, default=InstanceState.PROVISIONING, db_index=True
    )
    state_changed_at = models.DateTimeField(default=timezone.now)
    state_reason = models.CharField(max_length=255, blank=True)
    kv_capacity_tokens = models.PositiveBigIntegerField(
        "KV cache (tokens)", default=0, help_text="Read from the instance when it starts; 0 until then."
    )
    startup = models.CharField(
        max_length=120, blank=True, help_text="How far its start has come, by the server's log; empty when it is ready."
    )
    engine = models.JSONField(
        default=dict, blank=True, help_text="What the server is: version, arguments, KV cache and memory, as measured."
    )
    process_id = models.PositiveIntegerField(null=True, blank=True, help_text="Process on the node, for the launcher.")
    host = models.CharField(
        max_length=255,
        blank=True,
        help_text="Host whose worker started the process; commands belong to it until it stops.",
    )
    gpus = models.JSONField(
        "GPUs",
        default=list,
        blank=True,
        editable=False,
        help_text="Of its process, by name; empty: not known, or none.",
    )
    launched_with = models.JSONField(
        default=dict,
        blank=True,
        editable=False,
        help_text="Settings that its server was started with, secrets as digests; empty: not known.",
    )
    swap_group = models.ForeignKey(
        SwapGroup,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="instances",
        help_text="Instances that share its GPUs, of which one at most is awake; empty: its GPUs are its own.",
    )
    takes_over = models.OneToOneField(
        "self",
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        editable=False,
        related_name="taken_over_by",
        help_text="Donated instance whose GPUs it gets: it starts when that one has stopped.",
    )
    sleep_level = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="vLLM's, while it sleeps: 1 keeps the weights in CPU memory, 2 discards them."
    )
    api_key = models.CharField(
        "API key",
        max_length=255,
        blank=True,
        editable=False,
        help_text="The token that its server was started with; not shown.",
    )
    held = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who stopped it by hand, and why: only an operator's start or swap lifts that. Empty: nobody.",
    )
    restart = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who wants it started again once it has stopped, and why. Empty: nobody.",
    )
    failures = models.PositiveIntegerField(default=0, help_text="Failures in a row; restarts wait longer with each.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    changed_at = models.DateTimeField(auto_now=True, db_index=True)

    objects = InstanceQuerySet.as_manager()

    class Meta:
        ordering = ["name"]
        constraints = [
            # Two rows for one server would count its load and capacity twice.
            models.UniqueConstraint(
                fields=["url"],
                condition=~Q(url="") & ~Q(state=InstanceState.STOPPED),
                name="one_living_instance_per_url",
            ),
            models.UniqueConstraint(
                fields=["swap_group"], condition=Q(state__in=sorted(AWAKE)), name="one_awake_instance_per_swap_group"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def token(self) -> str:
        """Token that its server requires, "" for none; a launched server keeps the one it was started with."""
        return self.deployment.api_key if self.launcher == Launcher.EXTERNAL else self.api_key

    @property
    def tier(self) -> Tier:
        """Location of its weights, or their destination."""
        if self.state == InstanceState.SLEEPING:
            return Tier.STORAGE if self.sleep_level == 2 else Tier.CPU
        return Tier.GPU if self.state in AWAKE else Tier.STOPPED

    @property
    def max_num_seqs(self) -> int:
        """Maximum concurrent requests that its server was started with, else its deployment's."""
        return int(self.launched_with.get("max_num_seqs", self.deployment.max_num_seqs))

    @property
    def adapter_slots(self) -> tuple[int, int]:
        """LoRA adapters that fit on its GPUs and in its CPU memory, as its server was started, else by its deployment."""
        of = self.deployment
        on_gpu = int(self.launched_with.get("max_loras", 0) if self.launched_with else of.max_loras)
        in_memory = int(self.launched_with.get("max_cpu_loras", 0) if self.launched_with else of.max_cpu_loras)
        return on_gpu, max(on_gpu, in_memory)

    @property
    def offload(self) -> tuple[int, float, float]:
        """`Deployment.offload_of`, with the CPU memory that its server was started with, else by its deployment."""
        gib = self.launched_with.get("kv_offload_gib", 0.0) if self.launched_with else self.deployment.kv_offload_gib
        return self.deployment.offload_of(gib)

    def clean(self) -> None:
        errors = {}
        if self.launcher == Launcher.EXTERNAL and not self.url:
            errors["url"] = "An instance that is started elsewhere needs its address."
        if self.url and self.state != InstanceState.STOPPED:
            others = Instance.objects.filter(url=self.url).exclude(state=InstanceState.STOPPED).exclude(pk=self.pk)
            if other := others.first():
                errors["url"] = f"{other.name} has this address and is {other.state}."
        if self.deployment_id:
            errors.update(self._errors_of_launcher())
            if self.node is not None:
                errors.update(self._errors_of_node(self.node))
            if self.swap_group is not None:
                errors.update(self._errors_of_swap_group(self.swap_group))
        if errors:
            raise ValidationError(errors)

    def _errors_of_launcher(self) -> dict[str, str]:
        deployment = self.deployment
        if self.launcher in OF_VLLM and not deployment.model.source:
            return {"launcher": f"{deployment.model} has no source that vLLM could load: set it on the model first."}
        if self.launcher == Launcher.RAY and self.node is None:
            return {"launcher": "Ray starts instances on its own nodes: name one of them."}
        if self.node is not None and self.launcher != (own := self.node.launcher(self.launcher)):
            return {"launcher": f"Instances on {self.node} have the launcher {own}."}
        if self.launcher == Launcher.EMULATED and deployment.profile() is None:
            return {
                "launcher": f"An emulated instance needs a performance profile; there is none for {deployment.model} "
                f"on {deployment.tensor_parallel} x {deployment.gpu_type}."
            }
        return {}

    def _errors_of_swap_group(self, group: SwapGroup) -> dict[str, str]:
        """Return errors unless all members have the same node, GPU type and number of GPUs."""
        own = self.deployment
        if self.launcher == Launcher.RAY:
            return {"swap_group": "Ray gives each instance GPUs of its own: it shares none."}
        for other in group.instances.exclude(pk=self.pk).select_related(
            "deployment__gpu_type", "deployment__model", "node"
        ):
            theirs = other.deployment
            if (own.gpu_type_id, own.tensor_parallel) != (theirs.gpu_type_id, theirs.tensor_parallel):
                return {
                    "swap_group": f"{other.name} has {theirs.tensor_parallel} x {theirs.gpu_type} in {group}; this "
                    f"deployment asks for {own.tensor_parallel} x {own.gpu_type}."
                }
            if own.region_id != theirs.region_id or self.node_id != other.node_id:
                return {"swap_group": f"{other.name} of {group} is on {other.node or 'no node'}: share its place."}
            if own.pk == theirs.pk:
                return {"swap_group": f"{other.name} of {group} serves {own.model} too: share GPUs with another model."}
            if own.model.shard != theirs.model.shard:
                return {
                    "swap_group": f"{other.name} of {group} serves {theirs.model} of shard {theirs.model.shard}; "
                    f"{own.model} is in shard {own.model.shard}: deal both to one shard first."
                }
        return {}

    def _errors_of_node(self, node: Node) -> dict[str, str]:
        deployment = self.deployment
        if node.region_id != deployment.region_id:
            return {"node": f"{node} is in {node.region}, the deployment in {deployment.region}."}
        if node.gpu_type_id != deployment.gpu_type_id:
            return {"node": f"{node} has {node.gpu_type} GPUs, the deployment asks for {deployment.gpu_type}."}
        free = node.free_gpus(without=self)
        if self.state != InstanceState.STOPPED and deployment.tensor_parallel > free:
            return {
                "node": f"{node} has {node.gpu_count} GPUs, {free} of them free; "
                f"this instance needs {deployment.tensor_parallel}."
            }
        return {}


class CommandVerb(models.TextChoices):
    START = "start", "Start"
    STOP = "stop", "Stop"
    SLEEP = "sleep", "Sleep"
    WAKE = "wake", "Wake"


class CommandState(models.TextChoices):
    PENDING = "pending", "Pending"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"


class InstanceCommandQuerySet(models.QuerySet["InstanceCommand"]):
    def open(self) -> "InstanceCommandQuerySet":
        """Pending and running commands, oldest first."""
        return self.filter(state__in=[CommandState.PENDING, CommandState.RUNNING]).order_by("pk")


class InstanceCommand(models.Model):
    """Command for an instance, carried out by a Celery worker. Commands are idempotent."""

    # Of the object that a service returned: whether the workers were notified at once. None: not tried (not committed).
    delivered: bool | None = None

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="commands")
    verb = models.CharField(max_length=16, choices=CommandVerb.choices)
    state = models.CharField(max_length=16, choices=CommandState.choices, default=CommandState.PENDING, db_index=True)
    actor = models.CharField(max_length=120)
    reason = models.CharField(max_length=255, blank=True)
    error = models.TextField(blank=True)
    sleep_level = models.PositiveSmallIntegerField(default=1, help_text="Of a sleep: vLLM's level.")
    drained_at = models.DateTimeField(null=True, blank=True, help_text="Of a sleep: when nothing ran any more.")
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    objects = InstanceCommandQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.verb} {self.instance}"
