"""`/api`: tenants and keys. Three actors: an operator of the fleet, acme's people, and a stranger."""

import pytest
from django.utils import timezone

from controlplane.accounts.models import ApiKey, hash_secret
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.events.models import Event

pytestmark = pytest.mark.django_db


def names(response):
    assert response.status_code == 200
    return sorted(item["name"] for item in response.json()["items"])


@pytest.fixture
def keys(acme, globex):
    return {tenant.name: create_api_key(tenant, f"{tenant.name}-key", "test")[0] for tenant in (acme, globex)}


class TestReading:
    def test_tenants(self, sign_in, with_key, acme, globex, operations):
        assert names(sign_in("viewer").get("tenants")) == ["acme", "globex", "operations"]
        assert names(sign_in("member").get("tenants")) == ["acme"]
        assert names(sign_in("stranger").get("tenants")) == ["globex"]
        assert names(with_key(acme).get("tenants")) == ["acme"]

    def test_keys(self, sign_in, with_key, keys, acme):
        assert names(sign_in("operator").get("keys")) == ["acme-key", "globex-key"]
        assert names(sign_in("member").get("keys")) == ["acme-key"]
        assert names(sign_in("stranger").get("keys")) == ["globex-key"]
        assert names(sign_in("operator").get("keys", tenant="acme")) == ["acme-key"]
        assert names(with_key(acme).get("keys")) == ["acme-key", "test"]

    def test_no_answer_holds_a_hash(self, sign_in, keys):
        text = sign_in("operator").get("keys").content.decode()
        assert all(key.sha256 not in text for key in keys.values())

    def test_lists_take_a_fixed_number_of_queries(self, sign_in, keys, acme, django_assert_num_queries):
        caller = sign_in("operator")
        for number in range(10):
            create_api_key(acme, f"more-{number}", "test")
        with django_assert_num_queries(4):  # session, user, role, keys
            caller.get("keys")
        with django_assert_num_queries(5):  # … tenants and their classes
            caller.get("tenants")

    def test_me(self, sign_in, with_key, acme):
        me = sign_in("operator").get("me").json()
        assert (me["user"], me["fleet_role"]) == ("operator", "operator")
        assert with_key(acme).get("me").json() == {
            "user": None,
            "tenant": "acme",
            "fleet_role": None,
            "tenants": ["acme"],
        }


class TestCreating:
    @pytest.mark.parametrize("who", ["operator", "fleet_admin", "key_manager"])
    def test_the_secret_is_in_the_answer_once(self, who, sign_in, acme):
        caller = sign_in(who)
        response = caller.post("keys", tenant="acme", name="laptop")
        assert response.status_code == 201
        secret = response.json()["secret"]
        assert ApiKey.objects.get().sha256 == hash_secret(secret)
        assert secret not in caller.get("keys").content.decode()
        assert Event.objects.get(kind="api_key.created").subject.startswith("laptop")

    @pytest.mark.parametrize("who", ["viewer", "member", "stranger"])
    def test_others_are_refused(self, who, sign_in, acme):
        response = sign_in(who).post("keys", tenant="acme", name="laptop")
        assert response.status_code == 403
        assert response.json()["error"]["field"] == "tenant"
        assert not ApiKey.objects.exists()

    def test_a_key_makes_no_keys(self, with_key, acme):
        assert with_key(acme).post("keys", tenant="acme", name="more").status_code == 401

    @pytest.mark.parametrize(
        ("values", "field"),
        [
            ({"name": ""}, "name"),
            ({"name": "   "}, "name"),
            ({"name": "x" * 81}, "name"),
            ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
            ({"expires_at": "soon"}, "expires_at"),
            ({"role": "admin"}, "role"),
        ],
    )
    def test_mistakes_name_their_field(self, values, field, sign_in, acme):
        response = sign_in("operator").post("keys", **{"tenant": "acme", "name": "laptop"} | values)
        assert response.status_code == 422
        assert response.json()["error"]["field"] == field


class TestRevoking:
    def test_a_revoked_key_is_refused_at_once(self, sign_in, with_key, acme):
        caller = with_key(acme)
        assert caller.get("keys").status_code == 200
        response = sign_in("key_manager").post(f"keys/{caller.key.pk}/revoke", reason="leaked")
        assert response.status_code == 200
        assert response.json()["usable"] is False
        assert caller.get("keys").status_code == 401
        assert Event.objects.get(kind="api_key.revoked").reason == "leaked"

    def test_revoking_twice_is_one_event(self, sign_in, keys):
        caller = sign_in("operator")
        for _ in range(2):
            assert caller.post(f"keys/{keys['acme'].pk}/revoke", reason="leaked").status_code == 200
        assert Event.objects.filter(kind="api_key.revoked").count() == 1

    def test_strangers_do_not_learn_that_a_key_exists(self, sign_in, keys):
        response = sign_in("stranger").post(f"keys/{keys['acme'].pk}/revoke", reason="x")
        missing = sign_in("stranger").post("keys/999999/revoke", reason="x")
        assert response.status_code == missing.status_code == 404
        assert response.json() == missing.json()

    def test_who_sees_may_still_not_revoke(self, sign_in, keys):
        assert sign_in("member").post(f"keys/{keys['acme'].pk}/revoke", reason="x").status_code == 404
        assert sign_in("viewer").post(f"keys/{keys['acme'].pk}/revoke", reason="x").status_code == 404

    def test_expired_keys_and_keys_of_inactive_tenants_are_refused(self, with_key, acme):
        caller = with_key(acme)
        ApiKey.objects.update(expires_at=timezone.now())
        assert caller.get("keys").status_code == 401
        ApiKey.objects.update(expires_at=None)
        acme.active = False
        acme.save()
        assert caller.get("keys").status_code == 401

    def test_a_bad_key_is_not_saved_by_a_good_session(self, sign_in, keys):
        caller = sign_in("operator")
        revoke_api_key(keys["acme"], "test", "x")
        caller.headers = {"Authorization": "Bearer ph_wrong"}
        assert caller.get("keys").status_code == 401
