"""`/api`: how predicted output lengths fared, and the versions of the length model. Viewers read, operators decide."""

from datetime import timedelta
from typing import Any

from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Query, Router, Schema, Status

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.schemas import DecisionIn, Described, Items, RowSchema
from controlplane.fleet.models.serving import LengthModelKind
from controlplane.lengths import selectors, services, training
from controlplane.lengths.models import LengthTraining, LengthVersion, TrainingState, VersionState

router = Router(auth=VIEWERS, tags=["Lengths"])


class LengthQuery(Schema):
    hours: float = Field(24.0, gt=0, le=24 * 366, description="The last so many hours.")
    model: str = ""
    tenant: str = ""
    predictor: str = ""


class LengthMeasuresOut(Described):
    """Requests of a model and tenant that one predictor answered, with its errors in tokens of one sequence."""

    model: str
    tenant: str
    predictor: str
    """`cache`, `lexical cache`, `embedding cache`, `prior`, a version such as `student 3` (0 comes with
    Pilothouse), or its shadow."""
    requests: int
    mean_output_tokens: float
    mae_tokens: float
    bias_tokens: float
    """Predicted less real: above 0 it predicts too long."""
    acc_25: float
    """Share of requests off by at most 25 tokens."""
    acc_50: float
    acc_100: float
    below_median: float
    """Share at most as long as the predicted median; 0.5 is right."""
    below_upper: float
    """Share at most as long as the predicted 0.9 quantile; 0.9 is right."""


class LengthVersionOut(RowSchema):
    class Meta:
        model = LengthVersion
        fields = ("number", "kind", "trained_at", "samples", "note", "changed_at")

    state: VersionState
    measures: dict[str, Any]
    """On samples held out of its training."""


class TrainingIn(DecisionIn):
    kind: LengthModelKind = LengthModelKind.STUDENT
    """The kind to train. Kinds that read prompts learn from tenants that keep them alone."""


class TrainingOut(RowSchema):
    class Meta:
        model = LengthTraining
        fields = (
            "id",
            "kind",
            "asked_at",
            "asked_by",
            "reason",
            "step",
            "done",
            "steps",
            "started_at",
            "ended_at",
            "error",
        )

    state: TrainingState
    version: int | None = None
    """Number of what came of it."""

    @staticmethod
    def resolve_version(row: LengthTraining) -> int | None:
        return row.version.number if row.version else None


@router.get("/lengths", response=Items[LengthMeasuresOut])
def list_lengths(request: ApiRequest, query: Query[LengthQuery]) -> dict[str, Any]:
    """How predictions fared by model, tenant and predictor; shadows are among the predictors."""
    since = timezone.now() - timedelta(hours=query.hours)
    scope = selectors.Scope(since, query.model, frozenset([query.tenant]) if query.tenant else None)
    sums_by_series = selectors.by_series(scope)
    return {
        "items": [
            {
                "model": model,
                "tenant": tenant,
                "predictor": predictor,
                "requests": sums.requests,
                "mean_output_tokens": sums.mean_output,
                "mae_tokens": sums.mae,
                "bias_tokens": sums.bias,
                "acc_25": sums.acc_25,
                "acc_50": sums.acc_50,
                "acc_100": sums.acc_100,
                "below_median": sums.coverage_median,
                "below_upper": sums.coverage_upper,
            }
            for (model, tenant, predictor), sums in sorted(sums_by_series.items())
            if sums.requests and (not query.predictor or predictor == query.predictor)
        ]
    }


@router.get("/lengths/versions", response=Items[LengthVersionOut])
def list_length_versions(request: ApiRequest) -> dict[str, Any]:
    """Versions of the length model, newest first. When none is active, the student that comes with Pilothouse answers."""
    return {"items": selectors.versions()}


@router.post("/lengths/versions/{int:number}/promote", response=LengthVersionOut)
def promote_length_version(request: ApiRequest, number: int, body: DecisionIn) -> LengthVersion:
    """Make a shadow the active version; gateways take it up within seconds. 409 unless it is a shadow."""
    user = request.auth.require(Role.OPERATOR)
    return services.promote(_version(number), user, body.reason)


@router.post("/lengths/versions/{int:number}/reject", response=LengthVersionOut)
def reject_length_version(request: ApiRequest, number: int, body: DecisionIn) -> LengthVersion:
    """Reject a shadow. 409 unless it is one."""
    user = request.auth.require(Role.OPERATOR)
    return services.reject(_version(number), user, body.reason)


@router.post("/lengths/versions/{int:number}/shadow", response=LengthVersionOut)
def put_length_version_in_shadow(request: ApiRequest, number: int, body: DecisionIn) -> LengthVersion:
    """Put a rejected version back in shadow, to be judged again. 409 unless it was rejected."""
    user = request.auth.require(Role.OPERATOR)
    return services.put_in_shadow(_version(number), user, body.reason)


@router.post("/lengths/versions/{int:number}/rollback", response=LengthVersionOut)
def roll_back_length_version(request: ApiRequest, number: int, body: DecisionIn) -> LengthVersion:
    """Go back to a retired version, or from the active one to what was there before; the active one is rejected.

    409 when this one is neither. The answer shows it as it is then.
    """
    user = request.auth.require(Role.OPERATOR)
    version = _version(number)
    services.rollback(None if version.state == VersionState.ACTIVE else version, user, body.reason)
    version.refresh_from_db()
    return version


@router.get("/lengths/trainings", response=Items[TrainingOut])
def list_length_trainings(request: ApiRequest) -> dict[str, Any]:
    """Trainings of versions, newest first, with the progress of those that run and the result of those that ended."""
    return {"items": selectors.trainings()}


@router.post("/lengths/train", response={202: TrainingOut})
def train_length_model(request: ApiRequest, body: TrainingIn) -> Status[LengthTraining]:
    """Have a worker train a version of a kind now, into the shadow. 409 when there are too few samples, or one runs."""
    user = request.auth.require(Role.OPERATOR)
    return Status(202, training.ask(user, body.reason, body.kind))


def _version(number: int) -> LengthVersion:
    return get_object_or_404(LengthVersion, number=number)
