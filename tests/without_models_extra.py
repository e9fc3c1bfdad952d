"""Tests as on a machine without the models extra: torch and transformers are not found."""

import pytest

from forecasting import models_extra

SENTENCE = "needs torch and transformers, which are not installed: run `make models`"


@pytest.fixture
def without_models_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_extra, "find_spec", lambda name: None)
    monkeypatch.setattr(models_extra, "_installed", set())
