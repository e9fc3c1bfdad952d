"""SLO classes."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q

from controlplane.fleet.models.prices import PriceOf, keep_price
from scheduling.queueing.promises import ADMIT, DEGRADE, IF_UNREACHABLE


class SloKind(models.TextChoices):
    """SageServe section 3.3: interactive work, non-interactive work with a deadline, and work that takes what is left."""

    INTERACTIVE = "interactive", "Interactive"
    NON_INTERACTIVE = "non_interactive", "Non-interactive"
    OPPORTUNISTIC = "opportunistic", "Opportunistic"


class OnReclaim(models.TextChoices):
    """Policy for a request on a donated instance that is reclaimed."""

    REQUEUE = "requeue", "Queue it again"
    END = "end", "End it with an error"


class SloClass(models.Model):
    """The promise to a request: latency targets at a percentile, a deadline and a price."""

    name = models.SlugField(max_length=40, unique=True, help_text="The value of X-SLO-Class.")
    title = models.CharField(max_length=80)
    kind = models.CharField(max_length=16, choices=SloKind.choices)
    service_tier = models.SlugField(
        max_length=16,
        blank=True,
        db_index=False,
        help_text="OpenAI service_tier that selects this class, such as priority or flex.",
    )
    ttft_target_ms = models.PositiveIntegerField(
        "TTFT target (ms)", null=True, blank=True, validators=[MinValueValidator(1)], help_text="Time to first token."
    )
    itl_target_ms = models.PositiveIntegerField(
        "ITL target (ms)",
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Time between output tokens.",
    )
    e2e_target_ms = models.PositiveIntegerField(
        "E2E target (ms)",
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="From arrival to last token.",
    )
    percentile = models.FloatField(
        default=95.0,
        validators=[MinValueValidator(1.0), MaxValueValidator(100.0)],
        help_text="Share of requests that must meet the latency targets, in percent.",
    )
    deadline_s = models.PositiveIntegerField(
        "deadline (s)",
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Time from arrival to the last token.",
    )
    price_factor = models.DecimalField(
        max_digits=6,
        decimal_places=3,
        default=1,
        validators=[MinValueValidator(0)],
        help_text="Times the normal price.",
    )
    priority = models.SmallIntegerField(default=0, help_text="Priority passed to vLLM: lower runs earlier.")
    if_unreachable = models.CharField(
        "if a promise is unreachable",
        max_length=8,
        choices=list(IF_UNREACHABLE.items()),
        default=ADMIT,
        help_text="What happens to a request whose estimated wait (99th percentile) is too long for its promise.",
    )
    degrades_to = models.ForeignKey(
        "self",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="+",
        help_text="The class that takes requests whose promise is unreachable, if their tenant may use it.",
    )
    on_reclaim = models.CharField(
        max_length=8,
        choices=OnReclaim.choices,
        default=OnReclaim.REQUEUE,
        help_text="Of opportunistic requests: what becomes of one that runs on a donated instance when that is reclaimed.",
    )

    class Meta:
        ordering = ["priority", "name"]
        verbose_name = "SLO class"
        verbose_name_plural = "SLO classes"
        constraints = [
            models.UniqueConstraint(
                fields=["service_tier"], condition=~Q(service_tier=""), name="one_slo_class_per_service_tier"
            )
        ]

    def __str__(self) -> str:
        return self.title

    def save(self, *args: Any, **kwargs: Any) -> None:
        """A changed price factor counts from now on (`prices`)."""
        super().save(*args, **kwargs)
        keep_price(PriceOf.SLO_CLASS, self.name, float(self.price_factor))

    @property
    def promises(self) -> bool:
        """Return whether a request of it can miss anything."""
        targets = (self.ttft_target_ms, self.itl_target_ms, self.e2e_target_ms, self.deadline_s)
        return any(target is not None for target in targets)

    def clean(self) -> None:
        errors = {}
        targets = ("ttft_target_ms", "itl_target_ms", "e2e_target_ms")
        if self.kind == SloKind.NON_INTERACTIVE and self.deadline_s is None:
            errors["deadline_s"] = "Non-interactive work is promised by a deadline: give one."
        if self.kind == SloKind.INTERACTIVE and all(getattr(self, target) is None for target in targets):
            errors["ttft_target_ms"] = "Interactive work is promised a latency: give at least one target."
        if (
            self.ttft_target_ms is not None
            and self.e2e_target_ms is not None
            and self.ttft_target_ms > self.e2e_target_ms
        ):
            errors["e2e_target_ms"] = "The last token does not come before the first: not below the TTFT target."
        if problem := self._problem_of_degrading():
            errors["degrades_to"] = problem
        if self.service_tier:
            others = SloClass.objects.filter(service_tier=self.service_tier).exclude(pk=self.pk)
            if other := others.first():
                errors["service_tier"] = f"{other} is selected by this service tier already."
        if errors:
            raise ValidationError(errors)

    def _problem_of_degrading(self) -> str:
        if self.if_unreachable == DEGRADE and self.degrades_to is None:
            return "Name the class that requests are degraded to."
        if self.if_unreachable != DEGRADE and self.degrades_to is not None:
            return "Only a class that degrades requests names another one."
        names, following = [self.name], self.degrades_to
        while following is not None:
            if following.name in names:
                return f"The classes degrade in a circle: {' to '.join([*names, following.name])}."
            names.append(following.name)
            following = following.degrades_to
        return ""
