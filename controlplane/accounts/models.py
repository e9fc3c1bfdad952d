"""Users of the console, tenants of the API, and API keys."""

import hashlib
import secrets
from zoneinfo import ZoneInfo, available_timezones

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.dispatch import receiver
from django.utils import timezone

KEY_PREFIX = "ph_"
KEY_SHOWN_CHARS = 11  # "ph_" and 8 characters: enough to know a key again, useless to guess the rest


class Role(models.TextChoices):
    """Rights grow from left to right: a viewer reads, an operator acts on the fleet, an admin also edits inventory."""

    VIEWER = "viewer", "Viewer"
    OPERATOR = "operator", "Operator"
    ADMIN = "admin", "Admin"

    @property
    def rank(self) -> int:
        return list(Role).index(self)


class User(AbstractUser):
    """A user of the console; or, with a `service_role`, the account of a service key, which cannot sign in."""

    service_role = models.CharField(max_length=16, choices=Role.choices, blank=True, editable=False)

    def fleet_role(self) -> Role | None:
        """Return the user's highest role over the fleet; None for users of single tenants."""
        if self.service_role:
            return Role(self.service_role)
        if self.is_superuser:
            return Role.ADMIN
        roles = self.memberships.filter(tenant__operates_fleet=True).values_list("role", flat=True)
        return max((Role(role) for role in roles), key=lambda role: role.rank, default=None)

    def has_fleet_role(self, least: Role) -> bool:
        role = self.fleet_role() if self.is_active else None
        return role is not None and role.rank >= least.rank


class Tenant(models.Model):
    """Organisation that sends requests, with limits, SLO classes and keys."""

    name = models.SlugField(
        max_length=63, unique=True, help_text="Short name used in tables and metrics, such as acme."
    )
    title = models.CharField(max_length=120, blank=True)
    operates_fleet = models.BooleanField(
        default=False, help_text="Members of this tenant see and, by their role, operate the whole fleet."
    )
    slo_classes = models.ManyToManyField(
        "fleet.SloClass", related_name="tenants", blank=True, verbose_name="SLO classes"
    )
    default_slo_class = models.ForeignKey(
        "fleet.SloClass",
        verbose_name="default SLO class",
        on_delete=models.PROTECT,
        related_name="+",
        help_text="Class of requests that name none.",
    )
    max_concurrent_requests = models.PositiveIntegerField(
        "max concurrent sequences",
        default=256,
        validators=[MinValueValidator(1)],
        help_text="Sequences (prompts times n) queued and running at one time; a request of more runs alone.",
    )
    tokens_per_minute = models.PositiveIntegerField(
        default=0,
        help_text="Prompt and output tokens a minute, as a bucket that holds one minute; 0 is no limit.",
    )
    time_zone = models.CharField(
        max_length=64,
        blank=True,
        help_text="Of its days and months in usage and budgets, such as Asia/Tokyo; empty: PILOTHOUSE_TIME_ZONE.",
    )
    regions = models.ManyToManyField(
        "fleet.Region",
        related_name="tenants",
        blank=True,
        help_text="Data residency: the only regions in which its requests are served, held and warmed; none: any.",
    )
    keep_prompts = models.BooleanField(
        default=False,
        help_text="Keep the text of a share of its prompts for a while, so that length models may learn from it.",
    )
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.title or self.name

    def clean(self) -> None:
        if self.time_zone and self.time_zone not in available_timezones():
            raise ValidationError(
                {"time_zone": f"There is no time zone {self.time_zone!r}: name one such as Asia/Tokyo."}
            )

    @property
    def residency(self) -> tuple[str, ...]:
        """The names of its regions, in order; empty: any."""
        return tuple(sorted(region.name for region in self.regions.all()))

    @property
    def zone(self) -> ZoneInfo:
        """The time zone of its days and months."""
        return ZoneInfo(self.time_zone or settings.TIME_ZONE)


@receiver(models.signals.pre_delete, sender="fleet.Region")
def _keep_residency(instance: models.Model, **_: object) -> None:
    """Refuse to delete a region to which a tenant is bound: that may leave it bound to none, so served anywhere."""
    bound: set[models.Model] = set(Tenant.objects.filter(regions=instance.pk))
    if bound:
        raise models.ProtectedError("Tenants are bound to the region.", bound)


class Membership(models.Model):
    """A user's role in a tenant."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "tenant"], name="one_membership_per_user_and_tenant")]

    def __str__(self) -> str:
        return f"{self.user} is {self.role} of {self.tenant}"

    def clean(self) -> None:
        if self.user_id and self.tenant_id:
            same = Membership.objects.filter(user=self.user_id, tenant=self.tenant_id).exclude(pk=self.pk)
            if same.exists():
                raise ValidationError({"tenant": "This user is a member of this tenant already: change that role."})


def hash_secret(secret: str) -> str:
    """Return the hexadecimal SHA-256: enough for 256-bit random secrets on a hot path (Argon2 is for passwords)."""
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKey(models.Model):
    """A tenant's key for `/v1`, which reads on `/api` what the tenant's people see; a service key, which has an *account*,
    also does there what that account's role allows. Only its first characters and its SHA-256 are stored; the secret is
    shown once.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=16, editable=False)
    sha256 = models.CharField("SHA-256", max_length=64, unique=True, editable=False)
    allowed_models = models.JSONField(
        default=list,
        blank=True,
        help_text="Names that its requests may ask for: of models, adapters and weighted targets; empty: all.",
    )
    account = models.OneToOneField(
        User, on_delete=models.PROTECT, null=True, blank=True, editable=False, related_name="service_key"
    )
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-created_at"]
        verbose_name = "API key"

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @staticmethod
    def new_secret() -> str:
        return KEY_PREFIX + secrets.token_urlsafe(32)

    def clean(self) -> None:
        if not self.pk and self.expires_at is not None and self.expires_at <= timezone.now():
            raise ValidationError({"expires_at": "A new key expires in the future."})
        if not self.pk and self.tenant_id and not self.tenant.active:
            raise ValidationError({"tenant": "This tenant is not active."})

    @property
    def role(self) -> Role | None:
        """Of a service key: what it may do over the fleet on `/api`."""
        return Role(self.account.service_role) if self.account is not None else None

    @property
    def usable(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())


class BudgetKind(models.TextChoices):
    """The unit of a budget."""

    REQUESTS = "requests_per_minute", "Requests a minute"
    TOKENS = "tokens_per_minute", "Tokens a minute"
    USD = "usd_per_month", "Dollars a month"
    BATCH_LINES = "batch_lines", "Batch lines waiting"


class Budget(models.Model):
    """A limit on the use of a tenant, an API key, a model or a combination: an alert at *soft*, a stop at *hard*."""

    tenant = models.ForeignKey(
        Tenant,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="budgets",
        help_text="Empty: of all tenants together, for a model.",
    )
    api_key = models.ForeignKey(
        ApiKey, verbose_name="API key", on_delete=models.CASCADE, null=True, blank=True, related_name="budgets"
    )
    model = models.CharField(max_length=160, blank=True, help_text="Empty: of all models together.")
    kind = models.CharField(max_length=20, choices=BudgetKind.choices)
    soft = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0)], help_text="An event and a header from here on."
    )
    hard = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0)], help_text="Refused with 429 from here on."
    )
    # Of dollars a month, counted from usage (`controlplane.usage.budgets`).
    spent_usd = models.FloatField("spent (USD)", default=0.0, editable=False)
    spent_until = models.DateTimeField(null=True, editable=False)
    usd_per_token = models.FloatField(default=0.0, editable=False)
    # Written by the process that owns the regions.
    alerted_at = models.DateTimeField(null=True, editable=False)
    stopped_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["tenant__name", "kind", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "api_key", "model", "kind"], name="one_budget_per_scope", nulls_distinct=False
            )
        ]

    def __str__(self) -> str:
        return f"{self.scope}: {self.amount}"

    @property
    def zone(self) -> ZoneInfo:
        """The time zone of its months: that of its tenant, else of all pages."""
        return self.tenant.zone if self.tenant is not None else ZoneInfo(settings.TIME_ZONE)

    @property
    def scope(self) -> str:
        """Whose budget it is, such as `acme, key laptop, llama-8b`."""
        of = [str(self.tenant) if self.tenant else "", f"key {self.api_key.name}" if self.api_key else "", self.model]
        return ", ".join(part for part in of if part)

    @property
    def amount(self) -> str:
        """The hard limit, else the soft one, with its unit."""
        limit = self.hard if self.hard is not None else self.soft or 0.0
        kind = BudgetKind(self.kind)
        return (
            f"${limit:,.2f} a month ({self.zone})" if kind is BudgetKind.USD else f"{limit:,.0f} {kind.label.lower()}"
        )

    def clean(self) -> None:
        if self.soft is None and self.hard is None:
            raise ValidationError({"hard": "Say where to warn, where to stop, or both."})
        if self.soft is not None and self.hard is not None and self.soft > self.hard:
            raise ValidationError({"soft": "It warns before it stops: not above the limit at which it stops."})
        if self.tenant is None and self.api_key is None and not self.model:
            raise ValidationError({"tenant": "Name a tenant, an API key or a model."})
        if self.api_key is not None:
            if self.tenant is None:
                self.tenant = self.api_key.tenant
            elif self.api_key.tenant_id != self.tenant_id:
                raise ValidationError({"api_key": f"This key is of {self.api_key.tenant}."})
        same = Budget.objects.filter(tenant=self.tenant, api_key=self.api_key, model=self.model, kind=self.kind)
        if same.exclude(pk=self.pk).exists():
            raise ValidationError({"kind": "There is a budget of this kind for this scope already: change that one."})


class SignInLink(models.Model):
    """A link that signs one user in once; `manage.py up` and `manage.py sign_in_link` print it."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    sha256 = models.CharField(max_length=64, unique=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "sign-in link"

    def __str__(self) -> str:
        return f"link for {self.user}, {'used' if self.used_at else 'unused'}"
