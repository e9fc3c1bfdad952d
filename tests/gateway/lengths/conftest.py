"""A gateway whose length service recovers fast, and one whose model predicts 50 tokens for every answer."""

import pytest

from controlplane.lengths import length_service as module
from forecasting.lengths import predictor
from forecasting.lengths.predictor import InLine
from tests.gateway.lengths.calls import use
from tests.lengths.bad_models import constant


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "PERIOD_S", 0.1)
    monkeypatch.setattr(predictor, "LEAST_REST_S", 0.05)
    monkeypatch.setattr(predictor, "HANGS_S", 0.3)


@pytest.fixture
async def service(served):
    """The gateway's length service, with a model that predicts 50 tokens for every answer."""
    lengths = served.gateway.lengths
    await use(lengths, InLine(constant("50")))
    return lengths
