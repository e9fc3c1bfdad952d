"""API keys on the data path: checked against the database at most once every few seconds, by hash only."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self

from channels.db import database_sync_to_async
from django.db.models import Prefetch, Q
from django.utils import timezone
from msgspec import structs

from controlplane.accounts.models import ApiKey
from controlplane.database import OwnThread
from controlplane.dispatch.port import Asked
from controlplane.fleet.models import OnReclaim, Region, SloClass, SloKind
from controlplane.fleet.selectors import near_zones
from controlplane.gateway.errors import ApiError, invalid, invalid_key, model_not_allowed
from scheduling.queueing.promises import ClassTerms, fallbacks

logger = logging.getLogger(__name__)
TIERS = (None, "auto", "default", "flex", "scale", "priority")
"""Values of `service_tier`: OpenAI's own; vLLM 0.32 takes no other in responses."""
_ASKED = tuple(name for name in ClassTerms.__struct_fields__ if name in Asked.__struct_fields__)
_terms_of = attrgetter(*ClassTerms.__struct_fields__)
CACHE_SIZE = 20_000
ANSWER_S = 3.0  # longest wait for the database
DATABASE_DOWN_GRACE_S = 60.0  # time that a valid key keeps working while the database cannot be read


class SloTerms(ClassTerms, frozen=True, kw_only=True):
    """An SLO class as the data path needs it: the terms on which its requests are queued, and its targets."""

    service_tier: str
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None
    e2e_target_ms: int | None = None
    objective: float = 0.95
    """Share of its requests that must meet its promises."""

    @classmethod
    def of(cls, row: SloClass) -> Self:
        terms = cls(
            row.name,
            row.priority,
            row.ttft_target_ms / 1000 if row.ttft_target_ms else None,
            interactive=row.kind == SloKind.INTERACTIVE,
            opportunistic=row.kind == SloKind.OPPORTUNISTIC,
            ends_on_reclaim=row.on_reclaim == OnReclaim.END,
            if_unreachable=row.if_unreachable,
            degrades_to=row.degrades_to.name if row.degrades_to else "",
            service_tier=row.service_tier,
            ttft_target_ms=row.ttft_target_ms,
            itl_target_ms=row.itl_target_ms,
            e2e_target_ms=row.e2e_target_ms,
            objective=row.percentile / 100,
        )
        return terms.within(row.deadline_s)

    def within(self, deadline_s: int | None) -> Self:
        """Return them with *deadline_s*: the last token is due then, or by its target."""
        e2e_s = self.e2e_target_ms / 1000 if self.e2e_target_ms else None
        end_s = min((each for each in (e2e_s, deadline_s) if each), default=None)
        return structs.replace(self, deadline_s=deadline_s, end_s=end_s)

    def asked(self) -> dict[str, Any]:
        """Return the fields of `Asked` that they are."""
        return {name: getattr(self, name) for name in _ASKED}

    @property
    def promises(self) -> bool:
        """Whether a request of the class could miss anything."""
        targets = (self.ttft_target_ms, self.itl_target_ms, self.e2e_target_ms, self.deadline_s)
        return any(target is not None for target in targets)

    def met(self, ttft_ms: float | None, itl_ms: float | None, e2e_ms: float) -> bool | None:
        """Return whether a finished request met every measurable target of its class; None when there is none."""
        met = None
        for value, target in (
            (ttft_ms, self.ttft_target_ms),
            (itl_ms, self.itl_target_ms),
            (e2e_ms, self.e2e_target_ms),
            (e2e_ms, self.deadline_s * 1000 if self.deadline_s else None),
        ):
            if target is not None and value is not None:
                if value > target:
                    return False
                met = True
        return met


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a key."""

    key_id: int
    tenant_id: int
    tenant: str
    max_concurrent_requests: int
    tokens_per_minute: int
    default_terms: SloTerms
    terms: dict[str, SloTerms]  # by class name
    expires_at_s: float | None = None
    rates: bool = True
    """Whether limits, and budgets by the minute, apply."""
    models: frozenset[str] = frozenset()
    """Names of models that it may ask for; empty: all."""

    def may_ask(self, model: str) -> bool:
        return not self.models or model in self.models

    def sees(self, model: str, tenant_id: int) -> bool:
        """Whether it may ask for *model*, which is of a tenant alone unless that is 0."""
        return self.may_ask(model) and tenant_id in (0, self.tenant_id)

    def check_model(self, model: str) -> None:
        """Raise ApiError 403 if requests may not ask for *model*."""
        if not self.may_ask(model):
            raise model_not_allowed(model)

    def fallbacks(self, terms: SloTerms) -> tuple[ClassTerms, ...]:
        """Return the classes to which a request of *terms* may be degraded, in order."""
        return tuple(ClassTerms(*_terms_of(each)) for each in fallbacks(terms, self.terms))

    def choose(self, header: str | None, service_tier: object, known: frozenset[str]) -> SloTerms:
        """Return the class of a request: `X-SLO-Class` first, then `service_tier`, then the tenant's default.

        *known* holds the names and tiers of every class. Raises ApiError: 400 for an unknown value, 403 for a class outside
        the tenant's entitlement.
        """
        if header:
            terms = self.terms.get(header)
            if terms is None:
                raise self._refused(header, "X-SLO-Class", known)
            return terms
        unknown_tier = service_tier in TIERS and service_tier not in known  # as OpenAI does where a tier is unavailable
        if service_tier is None or service_tier in ("auto", "default", "standard_only") or unknown_tier:
            return self.default_terms
        if not isinstance(service_tier, str):
            raise invalid("`service_tier` must be a string.", "service_tier", "invalid_type")
        for terms in self.terms.values():
            if service_tier in (terms.service_tier, terms.slo_class):
                return terms
        raise self._refused(service_tier, "service_tier", known)

    def _refused(self, word: str, param: str, known: frozenset[str]) -> ApiError:
        allowed = ", ".join(sorted(self.terms)) or "none"
        if word not in known:
            return invalid(
                f"There is no SLO class {word!r}; this tenant may use: {allowed}.", param, "unknown_slo_class"
            )
        return ApiError(
            403,
            f"This tenant may not use the SLO class {word!r}; it may use: {allowed}.",
            code="slo_class_not_allowed",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class Words:
    """Names that a request may use."""

    classes: frozenset[str] = frozenset()
    """Names and tiers of every SLO class."""
    regions: Mapping[str, str] = field(default_factory=dict)
    """Zone of each region."""
    near: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other zones of each, nearest first; empty where no region has one."""

    def region(self, name: str) -> str:
        """Return *name* if a region has it, or it is empty. Raises ApiError 400."""
        if name and name not in self.regions:
            known = ", ".join(sorted(self.regions)) or "none"
            raise invalid(f"There is no region {name!r}; there are: {known}.", "X-Region", "unknown_region")
        return name


def _load(hashes: Iterable[str], ids: Collection[int] = ()) -> tuple[dict[str, Grant], Words]:
    """Return grants of the usable keys among *hashes* (SHA-256, hexadecimal) and *ids*, and names for requests."""
    classes = frozenset(word for pair in SloClass.objects.values_list("name", "service_tier") for word in pair if word)
    rows = (
        ApiKey.objects.filter(Q(sha256__in=list(hashes)) | Q(pk__in=ids), revoked_at=None, tenant__active=True)
        .select_related("tenant__default_slo_class__degrades_to")
        .prefetch_related(Prefetch("tenant__slo_classes", SloClass.objects.select_related("degrades_to")))
    )
    grants = {}
    for row in rows:
        if not row.usable:
            continue
        tenant = row.tenant
        default = SloTerms.of(tenant.default_slo_class)
        grants[row.sha256] = Grant(
            key_id=row.pk,
            tenant_id=tenant.pk,
            tenant=tenant.name,
            max_concurrent_requests=tenant.max_concurrent_requests,
            tokens_per_minute=tenant.tokens_per_minute,
            default_terms=default,
            terms={each.slo_class: each for each in (*map(SloTerms.of, tenant.slo_classes.all()), default)},
            expires_at_s=row.expires_at.timestamp() if row.expires_at else None,
            models=frozenset(row.allowed_models),
        )
    regions = dict(Region.objects.values_list("name", "zone"))
    return grants, Words(classes, regions, near_zones(regions) if any(regions.values()) else {})


class Keys:
    """A cache of checked keys. A key that ends stops working at the next `refresh`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.words = Words()
        self._grants: dict[str, Grant | None] = {}  # None: no such usable key, remembered until the next refresh
        self._checked_s = clock()
        self._used: set[int] = set()
        self._lock = asyncio.Lock()
        self._read = OwnThread("keys", ANSWER_S)
        self.stop = self._read.stop

    async def check(self, authorization: bytes | None) -> Grant:
        """Return the grant behind an Authorization header. Raises ApiError 401, or 503 when no key can be checked at all."""
        if not authorization:
            raise invalid_key("No API key was sent. Send `Authorization: Bearer <key>`.")
        scheme, _, secret = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secret:
            raise invalid_key("The Authorization header must be `Bearer <key>`.")
        digest = hashlib.sha256(secret.strip()).hexdigest()
        grant = self._grants.get(digest)
        if grant is None:
            grant = await self._miss(digest)
        if grant.expires_at_s is not None and grant.expires_at_s <= time.time():
            raise invalid_key("This API key has expired.")
        self._used.add(grant.key_id)
        return grant

    async def _miss(self, digest: str) -> Grant:
        if digest not in self._grants:
            async with self._lock:  # one look-up at a time: a flood of wrong keys cannot take every thread
                if digest not in self._grants:
                    try:
                        grants, self.words = await self._read(_load, [digest])
                    except Exception as error:
                        logger.warning("API key could not be checked: %s", error)
                        raise ApiError(
                            503,
                            "API keys cannot be checked at this moment.",
                            code="keys_unavailable",
                            retry_after_s=2,
                        ) from error
                    if len(self._grants) >= CACHE_SIZE:
                        self._grants.pop(next(iter(self._grants)))
                    self._grants[digest] = grants.get(digest)
        grant = self._grants.get(digest)
        if grant is None:
            raise invalid_key("This API key is unknown or has been revoked.")
        return grant

    async def refresh(self, open_keys: Collection[int] = ()) -> set[int]:
        """Read every cached key again and drop unknown ones. On failure the cache is kept for a while.

        *open_keys*: ids of the keys of open requests; return those that may no longer be used. Raises what the database
        raises.
        """
        hashes = [digest for digest, grant in self._grants.items() if grant is not None]
        try:
            grants, self.words = await self._read(_load, hashes, open_keys)
        except Exception:
            if self.clock() - self._checked_s > DATABASE_DOWN_GRACE_S:
                self._grants.clear()
            raise
        self._grants = dict(grants)
        self._checked_s = self.clock()
        return set(open_keys) - {grant.key_id for grant in grants.values()}

    async def note_use(self) -> None:
        """Write `last_used_at` of the keys used since the last call."""
        used, self._used = self._used, set()
        if used:
            await database_sync_to_async(ApiKey.objects.filter(pk__in=used).update)(last_used_at=timezone.now())
