"""The models that may be asked for, as the dispatcher lists them."""

import orjson

from controlplane.dispatch.port import ServedModel, ServedModels, WeightedTargets
from controlplane.gateway.admission.keys import Grant
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import not_served, unknown_model
from scheduling.model_task import Task
from workers.vllm.tasks import MAY_ANSWER, PATHS


class Catalog:
    def __init__(self) -> None:
        self.known = False
        """Whether a dispatcher has listed its models."""
        self._models: dict[str, ServedModel] = {}
        self._shared: dict[str, WeightedTargets] = {}

    def update(self, record: ServedModels) -> None:
        self.known = True
        self._models = {model.name: model for model in record.models}
        self._shared = {}
        for each in record.targets:
            known = {name: weight for name, weight in each.weights.items() if weight > 0 and self._is_served(name)}
            if known:
                self._shared[each.name] = WeightedTargets(each.name, each.created_at, known)

    def _is_served(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.has_endpoint and not model.tenant_id

    def shared(self, name: str) -> dict[str, float]:
        """Return the weights of the targets that share the requests for *name*; empty for a model."""
        return self._shared[name].weights if name in self._shared else {}

    def fallback(self, model: ServedModel, kind: Kind, prompt_tokens: int) -> str:
        """Return the fallback of *model* for a request of *kind*; "" if it has none that could serve it."""
        other = self._models.get(model.fallback)
        if other is None or kind.path not in PATHS[Task(other.task)] or prompt_tokens >= other.context_tokens:
            return ""
        return other.name

    def serving(self, name: str, kind: Kind, tenant_id: int) -> ServedModel:
        """Return the model called *name*. Raises ApiError 404 if it is unknown or of another tenant, or serves no *kind*."""
        model = self._models.get(name)
        if model is None or model.tenant_id not in (0, tenant_id):
            raise unknown_model(name)
        task = Task(model.task)
        served = PATHS[task]
        if kind.path not in served and kind.path not in MAY_ANSWER.get(task, ()):
            raise not_served(name, kind.path, served)
        return model

    def page(self, name: str, grant: Grant) -> bytes:
        """Return the answer of `/v1/models/NAME`, or of `/v1/models` without a *name*: what *grant* may ask for.

        Raises ApiError 404.
        """
        shared = {each.name: self._as_model(each) for each in self._shared.values()}
        every = sorted((self._models | shared).items())
        models = {key: model for key, model in every if model.has_endpoint and grant.sees(key, model.tenant_id)}
        if not name:
            return orjson.dumps({"object": "list", "data": [_card(model) for model in models.values()]})
        if name not in models:
            raise unknown_model(name)
        return orjson.dumps(_card(models[name]))

    def _as_model(self, shared: WeightedTargets) -> ServedModel:
        """Return a public name as a model: with the context that all of its targets have."""
        models = [self._models[name] for name in shared.weights]
        context_tokens = min(model.context_tokens for model in models)
        return ServedModel(shared.name, context_tokens, shared.created_at, True, False, models[0].task)


def _card(model: ServedModel) -> dict[str, object]:
    """Return the description of a model in the form of OpenAI and vLLM."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "pilothouse",
        "root": model.base or model.name,
        "parent": model.base or None,
        "max_model_len": model.context_tokens,
        "permission": [_PERMISSION | {"id": f"modelperm-{model.name}", "created": model.created_at}],
        "task": model.task,
    }


_PERMISSION: dict[str, object] = {
    "id": "",
    "object": "model_permission",
    "created": 0,
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""As vLLM says it of every model."""
