"""The models that may be asked for, as the dispatcher last listed them."""

import orjson

from controlplane.dispatch.port import ServedModel, ServedModels
from controlplane.gateway.errors import unknown_model


class Catalog:
    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}

    def take(self, record: ServedModels) -> None:
        self._models = {model.name: model for model in record.models}

    def model(self, name: str) -> ServedModel:
        """Raises ApiError 404 for a model that is not known here."""
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name)
        return model

    def page(self, name: str) -> bytes:
        """What `/v1/models/NAME` answers, or `/v1/models` without a *name*: those of some endpoint. Raises ApiError 404."""
        models = {key: model for key, model in sorted(self._models.items()) if model.has_endpoint}
        if not name:
            return orjson.dumps({"object": "list", "data": [_card(model) for model in models.values()]})
        if name not in models:
            raise unknown_model(name)
        return orjson.dumps(_card(models[name]))


def _card(model: ServedModel) -> dict[str, object]:
    """As OpenAI and vLLM describe a model."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "pilothouse",
        "max_model_len": model.context_tokens,
    }
