"""Data residency of a tenant: its requests are served in its regions, or refused with the reason; its page says so."""

import pytest
from channels.db import database_sync_to_async
from django.db.models import ProtectedError

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Region
from controlplane.planning.scenario import residency

pytestmark = pytest.mark.asyncio


def bind(*names):
    tenant = Tenant.objects.get(api_keys__isnull=False)
    tenant.regions.set([Region.objects.get_or_create(name=name, defaults={"title": name})[0] for name in names])
    if names:
        assert residency() == {tenant.name: sorted(names)}
        with pytest.raises(ProtectedError):
            Region.objects.get(name=names[0]).delete()


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "west"]}])
async def test_a_bound_tenant_is_served_in_its_regions_alone(served):
    await database_sync_to_async(bind)("west")
    answers = [await served.chat(headers={"X-Region": "east"}) for _ in range(3)]
    assert [each.status for each in answers] == [200] * 3
    rows = await served.rows()
    assert {row.region for row in rows} == {"west"}
    assert rows[0].trace[0]["within"] == "west"


async def test_a_model_that_is_served_elsewhere_alone_is_refused_for_good(served):
    await database_sync_to_async(bind)("north")
    answer = await served.chat()
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (400, "not_served_in_regions")
    assert "north" in error["message"]
