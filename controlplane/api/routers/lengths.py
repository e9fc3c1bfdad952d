"""`/api`: accuracy of length predictions and versions of the length model. Viewers read, operators decide."""

from datetime import timedelta
from typing import Any

from django.utils import timezone
from ninja import Field, Query, Router, Schema, Status

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.resources import add_list, add_operations, schema_of
from controlplane.api.schemas import DecisionIn, Items
from controlplane.lengths import selectors, training
from controlplane.resources.lengths import LENGTH_SERIES, LENGTH_VERSIONS

router = Router(auth=VIEWERS, tags=["Lengths"])


class LengthQuery(Schema):
    hours: float = Field(24.0, gt=0, le=24 * 366, description="The last so many hours.")
    model: str = ""
    tenant: str = ""
    predictor: str = ""


LengthMeasuresOut = schema_of(
    LENGTH_SERIES,
    "LengthMeasuresOut",
    "Accuracy of one predictor for a model and tenant; errors in tokens per sequence.",
)
LengthVersionOut = schema_of(LENGTH_VERSIONS, "LengthVersionOut")


class TrainingIn(DecisionIn):
    kind: str = training.USUAL
    """Kind to train. Kinds that read prompts train only on each tenant's retained prompts."""


class TrainingOut(Schema):
    kind: str


@router.get("/lengths", response=Items[LengthMeasuresOut])  # type: ignore[valid-type]
def list_lengths(request: ApiRequest, query: Query[LengthQuery]) -> dict[str, Any]:
    """Return prediction accuracy by model, tenant and predictor, shadows included."""
    since = timezone.now() - timedelta(hours=query.hours)
    scope = selectors.Scope(since, query.model, frozenset([query.tenant]) if query.tenant else None)
    sums_by_series = selectors.by(scope, "model", "tenant", "predictor", shadows=True)
    return {
        "items": [
            {"model": model, "tenant": tenant, "predictor": predictor, "measures": sums}
            for (model, tenant, predictor), sums in sorted(sums_by_series.items())
            if sums.requests and (not query.predictor or predictor == query.predictor)
        ]
    }


add_list(
    router,
    LENGTH_VERSIONS,
    LengthVersionOut,
    "List versions of the length model, newest first. When none is active, the bundled one predicts.",
    path="/lengths/versions",
    paged=False,
)


add_operations(router, LENGTH_VERSIONS, LengthVersionOut, "/lengths/versions/{int:number}")


@router.post("/lengths/train", response={202: TrainingOut})
def train_length_model(request: ApiRequest, body: TrainingIn) -> Status[dict[str, str]]:
    """Have a worker train a version of a kind now, into shadow; an event says why if it fails. 409: too few samples."""
    user = request.auth.require(Role.OPERATOR)
    training.ask(user, body.reason, body.kind)
    return Status(202, {"kind": body.kind})
