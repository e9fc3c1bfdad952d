"""Prices by REST: admins set them from a moment on, the fleet's people read them, tenants do not."""

from controlplane.fleet.models import GpuType, Price


def test_an_admin_sets_a_price_and_learns_what_it_changes(gpu_type, sign_in, with_key, acme):
    body = {"of": "gpu", "name": gpu_type.name, "amount": 2.5, "reason": "a new contract"}
    assert with_key(acme).post("prices", **body).status_code in (401, 403)
    for who, status in (("member", 403), ("operator", 403), ("fleet_admin", 201)):
        answer = sign_in(who).post("prices", **body)
        assert answer.status_code == status, who
    assert answer.json()["months"] == []
    assert answer.json()["until"] is None
    assert float(GpuType.objects.get(pk=gpu_type.pk).on_demand_usd_per_hour) == 2.5
    wrong = sign_in("fleet_admin").post("prices", **body | {"name": "none"})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "name")
    listed = sign_in("viewer").get("prices", of="gpu").json()["items"]
    assert [(each["amount"], each["reason"]) for each in listed] == [(2.5, "a new contract"), (1.35, "")]
    assert listed[0]["created_by"] == Price.objects.get(reason="a new contract").created_by != ""
    assert sign_in("member").get("prices").status_code == 403


def test_a_price_of_the_inventory_is_an_entry_from_now_on(gpu_type, sign_in):
    answer = sign_in("fleet_admin").patch("inventory", gpu_types=[{"name": gpu_type.name, "spot_usd_per_hour": 0.5}])
    assert answer.status_code == 200, answer.content
    assert Price.objects.filter(of="spot", name=gpu_type.name).first().amount == 0.5
