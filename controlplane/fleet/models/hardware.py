"""Regions, GPU types with prices, and nodes."""

from typing import TYPE_CHECKING

from django.apps import apps
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce

from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.validators import validate_host

if TYPE_CHECKING:
    from controlplane.fleet.models.instances import Instance


class Region(models.Model):
    """A place with GPUs, such as US East."""

    name = models.SlugField(max_length=40, unique=True, help_text="Short name, such as us-east.")
    title = models.CharField(max_length=80)
    active = models.BooleanField(default=True)
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who cordoned it, and why: nothing is started there until an operator uncordons it. Empty: nobody.",
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.title


class RegionLatency(models.Model):
    """One-way network latency from *origin* to *target*; also for the way back unless that has a row.

    A request whose own region is full goes to the nearest: `scheduling.routing.regions.by_preference`.
    """

    origin = models.ForeignKey(Region, verbose_name="from", on_delete=models.PROTECT, related_name="latencies_from")
    target = models.ForeignKey(Region, verbose_name="to", on_delete=models.PROTECT, related_name="latencies_to")
    latency_ms = models.FloatField(
        "latency (ms)",
        validators=[MinValueValidator(0.0), MaxValueValidator(60_000.0)],
        help_text="One way; the same back unless that is given too.",
    )

    class Meta:
        ordering = ["origin__name", "target__name"]
        verbose_name_plural = "region latencies"
        constraints = [models.UniqueConstraint(fields=["origin", "target"], name="one_latency_from_region_to_region")]

    def __str__(self) -> str:
        return f"{self.origin} to {self.target}"

    def clean(self) -> None:
        if self.origin_id is not None and self.origin_id == self.target_id:
            raise ValidationError({"target": "Name another region: within one, nothing is added."})


class Device(models.TextChoices):
    """Kind of processor that vLLM runs on."""

    GPU = "gpu", "GPU"
    CPU = "cpu", "CPU"


class GpuType(models.Model):
    """A kind of accelerator, with its memory and prices; or CPUs, of which an instance takes one share of a node."""

    name = models.SlugField(max_length=40, unique=True, help_text="Short name, such as h100-80gb.")
    title = models.CharField(max_length=80)
    device = models.CharField(max_length=8, choices=Device.choices, default=Device.GPU)
    memory_bytes = models.PositiveBigIntegerField(
        "memory (bytes)",
        validators=[MinValueValidator(1)],
        help_text="Memory of one GPU, in bytes; of CPUs, what one instance may take.",
    )
    on_demand_usd_per_hour = models.DecimalField(
        "on demand", max_digits=8, decimal_places=4, validators=[MinValueValidator(0)]
    )
    spot_usd_per_hour = models.DecimalField(
        "spot", max_digits=8, decimal_places=4, null=True, blank=True, validators=[MinValueValidator(0)]
    )
    price_source = models.CharField(max_length=160, blank=True)

    class Meta:
        ordering = ["name"]
        verbose_name = "GPU type"

    def __str__(self) -> str:
        return self.title

    def clean(self) -> None:
        if (
            self.spot_usd_per_hour is not None
            and self.on_demand_usd_per_hour is not None
            and self.spot_usd_per_hour > self.on_demand_usd_per_hour
        ):
            raise ValidationError({"spot_usd_per_hour": "The spot price is not above the on-demand price."})


def gpus_of(path: str = "") -> Coalesce:
    """Return the GPUs of the instances at *path*: those their servers were started with, else their deployments'."""
    started = Cast(KeyTextTransform("tensor_parallel", f"{path}launched_with"), models.IntegerField())
    return Coalesce(started, F(f"{path}deployment__tensor_parallel"), output_field=models.IntegerField())


def _counted_once(instances: "QuerySet[Instance]") -> "QuerySet[Instance]":
    """Narrow to *instances* that are not stopped. Members of a swap group share their GPUs, so only the oldest counts; of a
    redeployment, the donated instance counts until it has stopped.
    """
    living = _instances().exclude(state=InstanceState.STOPPED)
    older = living.filter(swap_group=OuterRef("swap_group"), pk__lt=OuterRef("pk"))
    waits = Q(takes_over__isnull=False) & ~Q(takes_over__state=InstanceState.STOPPED)
    return instances.exclude(state=InstanceState.STOPPED).exclude(waits).exclude(Exists(older))


def _instances() -> "QuerySet[Instance]":
    """Return all instances; their model is defined on top of nodes."""
    rows: QuerySet[Instance] = apps.get_model("fleet", "Instance").objects.order_by()
    return rows


class NodeQuerySet(models.QuerySet["Node"]):
    def with_gpus_used(self) -> "NodeQuerySet":
        """Annotate `gpus_used`: GPUs that instances which are not stopped have; shared ones count once."""
        here = _counted_once(_instances().filter(node=OuterRef("pk")))
        used = here.values("node").annotate(gpus=Sum(gpus_of())).values("gpus")
        return self.annotate(gpus_used=Coalesce(Subquery(used, output_field=models.IntegerField()), 0))


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
        validators=[validate_host],
        help_text="Host name or IP address of its instances.",
    )
    active = models.BooleanField(default=True)
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who cordoned it, and why: nothing is started there until an operator uncordons it. Empty: nobody.",
    )

    objects = NodeQuerySet.as_manager()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def free_gpus(self, without: "Instance | None" = None) -> int:
        """Return free GPUs; stopped instances and *without*, with its swap group, do not count."""
        instances = self.instances.all()
        if without is not None:
            instances = instances.exclude(pk=without.pk)
            if without.swap_group_id is not None:
                instances = instances.exclude(swap_group=without.swap_group_id)
            if without.takes_over_id is not None:
                instances = instances.exclude(pk=without.takes_over_id)
        return self.gpu_count - (_counted_once(instances).aggregate(gpus=Sum(gpus_of()))["gpus"] or 0)

    def clean(self) -> None:
        if not self.pk:
            return
        running = self.instances.exclude(state=InstanceState.STOPPED)
        if self.gpu_count is not None and self.free_gpus() < 0:
            used = self.gpu_count - self.free_gpus()
            raise ValidationError({"gpu_count": f"Instances on this node use {used} GPUs."})
        for field in ("region", "gpu_type"):
            value = getattr(self, f"{field}_id")
            if running.exclude(**{f"deployment__{field}": value}).exists():
                raise ValidationError({field: "Instances on this node belong to deployments with another one."})
