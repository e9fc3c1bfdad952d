"""The overview of a new installation: a node, a model and a key, each made from there, until a request was served."""

import re

import pytest
from django.contrib.messages import get_messages

from controlplane.accounts.models import ApiKey, Tenant, User
from controlplane.fleet.models import Deployment, Node, SloClass
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db


def ticked(client) -> list[str]:
    """What is done on the overview; nothing where it shows no steps."""
    page = client.get("/").content.decode()
    return re.findall(r"Done: </span>\d\. ([\w ]+)<", page)


def test_three_steps_lead_to_the_first_request(client, live):
    client.force_login(User.objects.create_superuser("admin"))
    assert "Three steps to the first request" in client.get("/").content.decode()
    assert ticked(client) == []
    wrong = client.post(
        "/first-steps/node/", {"region": "home", "gpu_type": "abacus", "gpus": "8", "usd_per_gpu_hour": "2"}
    )
    assert "abacus" in str([*get_messages(wrong.wsgi_request)][-1])
    client.post("/first-steps/node/", {"region": "home", "gpu_type": "h100-80gb", "gpus": "8", "usd_per_gpu_hour": "2"})
    node = Node.objects.get()
    assert (node.region.title, node.gpu_type.name, node.gpu_count) == ("Home", "h100-80gb", 8)
    page = client.get("/").content.decode()
    href = re.search(r'href="(/models/deploy/[^"]*model=llama-3[^"]*)"', page)[1].replace("&amp;", "&")
    form = client.get(href).context["form"]
    given = {name: form[name].value() for name in form.fields if form[name].value() not in (None, "")}
    assert client.post("/models/deploy/", given).status_code == 302
    assert Deployment.objects.get().model.name.startswith("llama-3")
    client.post("/first-steps/tenant/", {"name": "Shop Floor"})
    tenant = Tenant.objects.get()
    assert (tenant.name, str(tenant), tenant.default_slo_class.name) == ("shop-floor", "Shop Floor", "interactive")
    assert tenant.slo_classes.count() == SloClass.objects.count() == 3
    assert "ph_" in client.post("/keys/", {"name": "First key", "tenant": tenant.pk}).content.decode()
    assert ApiKey.objects.get().tenant == tenant
    assert ticked(client) == ["Add a node", "Deploy a model", "Make a key"]
    ledger_row(tenant)
    assert "Three steps" not in client.get("/").content.decode()


def test_a_viewer_sees_who_takes_the_steps(reader):
    page = reader.get("/").content.decode()
    assert "An operator adds it." in page
    assert "/first-steps/" not in page
