"""Pages without the models extra: resting features, and the command that installs it."""

import html
import re

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.lengths.models import LengthVersion, VersionState
from controlplane.planning.services import switch_bundle
from tests.console.test_deploy_page import FORM
from tests.without_models_extra import SENTENCE, without_models_extra  # noqa: F401 (fixture)

pytestmark = pytest.mark.django_db


@pytest.fixture
def page(client, operator):
    """Return the text of a page, without tags and with code between backquotes."""
    client.force_login(operator)

    def text(name, *args, **query):
        answer = client.get(reverse(f"console:{name}", args=args), query)
        assert answer.status_code == 200
        marked = re.sub(r"</?code>", "`", answer.content.decode())
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", marked)).split())

    return text


@pytest.mark.usefixtures("without_models_extra")
class TestWithout:
    def test_system_has_a_row(self, page, live, fleet_feed):
        live.show(fleet_feed)
        assert "Models extra Not installed" in page("system")
        assert "Run `make models` for torch and transformers" in page("system")

    def test_choices_say_what_rests(self, page, live, deployment, operator):
        switch_bundle(deployment.model, "preserve", operator)
        text = page("model", deployment.model.name)
        assert f"The forecaster mlstm {SENTENCE}" in text
        assert "mLSTM (now) (not installed)" in text
        assert "mlstm (not installed)" in page("settings")

    def test_models_offer_no_training_on_an_encoder(self, page, client):
        LengthVersion.objects.create(
            number=1, kind="preserve", state=VersionState.SHADOW, trained_at=timezone.now(), samples=1
        )
        text = page("models")
        assert f"An encoder {SENTENCE}" in text
        assert "not installed" in text
        assert f"The length model preserve {SENTENCE}" in text  # at its version
        answer = client.post(reverse("console:train-lengths"), {"kind": "preserve", "reason": "now"}, follow=True)
        assert "The length model preserve needs torch" in answer.content.decode()

    def test_deploy_asks_for_the_sizes(self, acting):
        form = {
            **FORM,
            "source": "somebody/model",
            "parameters_billion": "",
            "kv_kib_per_token": "",
            "context_tokens": "",
        }
        answer = acting.post(reverse("console:deploy"), form)
        assert "<code>make models</code>, or give them." in answer.content.decode()


def test_with_it_no_page_says_anything(page, live, fleet_feed, deployment, monkeypatch):
    monkeypatch.setattr("forecasting.models_extra._installed", {"torch", "transformers"})
    live.show(fleet_feed)
    assert "Models extra Installed" in page("system")
    for name in ("models", "scaling", "settings"):
        text = page(name)
        assert "make models" not in text
        assert "not installed" not in text
