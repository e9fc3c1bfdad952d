"""`/api`: tenants and keys. Three actors: an operator of the fleet, acme's people, and a stranger."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Role, User, hash_secret
from controlplane.accounts.services import create_api_key, create_sign_in_link, revoke_api_key, use_sign_in_link
from controlplane.events.models import Event
from controlplane.fleet.models import Adapter
from tests.api.conftest import Caller

pytestmark = pytest.mark.django_db


@pytest.fixture
def keys(acme, globex):
    return {tenant.name: create_api_key(tenant, f"{tenant.name}-key", "test")[0] for tenant in (acme, globex)}


class TestReading:
    def test_lists_take_a_fixed_number_of_queries(self, sign_in, keys, acme, django_assert_num_queries):
        caller = sign_in("operator")
        for number in range(10):
            create_api_key(acme, f"more-{number}", "test")
        with django_assert_num_queries(4):  # session, user, role, keys
            caller.get("keys")
        with django_assert_num_queries(6):  # … tenants, their classes and regions
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


class TestAllowedModels:
    def put(self, caller, key, *names):
        return caller.patch(f"keys/{key.pk}", allowed_models=names, reason="audit")

    def test_a_key_may_ask_for_some(self, sign_in, acme, deployment):
        caller, model = sign_in("key_manager"), deployment.model.name
        made = caller.post("keys", tenant="acme", name="laptop", allowed_models=[model])
        assert made.json()["allowed_models"] == [model]
        key = ApiKey.objects.get()
        assert self.put(caller, key).json()["allowed_models"] == []
        event = Event.objects.get(kind="api_key.changed")
        assert (event.before, event.after, event.reason) == (
            {"allowed_models": [model]}, {"allowed_models": []}, "audit",
        )  # fmt: skip

    def test_only_names_that_there_are(self, sign_in, keys):
        refused = self.put(sign_in("key_manager"), keys["acme"], "nothing")
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "allowed_models")
        made = sign_in("key_manager").post("keys", tenant="acme", name="laptop", allowed_models=["nothing"])
        assert (made.status_code, ApiKey.objects.count()) == (422, 2)

    def test_an_adapter_of_another_tenant_is_no_name(self, sign_in, acme, globex, deployment):
        adapter = Adapter.objects.create(name="sql", base=deployment.model, source="globex/sql", tenant=globex)
        caller = sign_in("key_manager")

        def made(name):
            answer = caller.post("keys", tenant="acme", name="laptop", allowed_models=[name])
            return answer.status_code, answer.content.decode().replace(name, "NAME")

        assert made("sql") == made("nothing")
        assert made("sql")[0] == 422
        Adapter.objects.filter(pk=adapter.pk).update(tenant=acme)
        assert made("sql")[0] == 201


class TestRevoking:
    def test_a_revoked_key_is_refused_at_once(self, sign_in, with_key, acme):
        caller = with_key(acme)
        assert caller.get("keys").status_code == 200
        response = sign_in("key_manager").patch(f"keys/{caller.key.pk}", revoked=True, reason="leaked")
        assert response.status_code == 200
        assert response.json()["usable"] is False
        assert caller.get("keys").status_code == 401
        assert Event.objects.get(kind="api_key.revoked").reason == "leaked"

    def test_strangers_do_not_learn_that_a_key_exists(self, sign_in, keys):
        response = sign_in("stranger").patch(f"keys/{keys['acme'].pk}", revoked=True, reason="x")
        missing = sign_in("stranger").patch("keys/999999", revoked=True, reason="x")
        assert response.status_code == missing.status_code == 404
        assert response.json() == missing.json()

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


@pytest.fixture
def service(operations):
    """`service(role)`: a caller with a new service key of that role; `.key` is the row."""

    def of(role, days=30):
        expires_at = timezone.now() + timedelta(days=days)
        key, secret = create_api_key(operations, f"{role} bot", "test", expires_at=expires_at, role=Role(role))
        caller = Caller(Client(), {"Authorization": f"Bearer {secret}"})
        caller.key = key
        return caller

    return of


class TestServiceKeys:
    def test_it_acts_as_itself(self, service, make_instance):
        caller, instance = service("operator"), make_instance(state="ready")
        assert caller.post(f"instances/{instance.name}/drain", reason="by a script").status_code == 200
        event = Event.objects.get(kind="instance.moved")
        assert event.actor == f"operator-bot@{caller.key.prefix}"
        assert (event.user, event.reason) == (caller.key.account, "by a script")
        assert caller.get("me").json() | {"tenants": None} == {
            "user": event.actor,
            "tenant": "operations",
            "fleet_role": "operator",
            "tenants": None,
        }

    def test_it_ends(self, service, sign_in):
        caller = service("operator")
        ApiKey.objects.filter(pk=caller.key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
        assert caller.get("instances").status_code == 401
        caller = service("admin")
        assert sign_in("operator").patch(f"keys/{caller.key.pk}", revoked=True, reason="leaked").status_code == 200
        assert caller.get("instances").status_code == 401
        assert not User.objects.get(pk=caller.key.account.pk).is_active

    def test_its_account_cannot_sign_in(self, service):
        account = service("admin").key.account
        assert not account.has_usable_password()
        assert use_sign_in_link(create_sign_in_link(account)) is None

    def test_its_use_is_noted(self, service):
        caller = service("viewer")
        caller.get("me")
        assert ApiKey.objects.get(pk=caller.key.pk).last_used_at is not None

    @pytest.mark.parametrize(
        ("who", "values", "field"),
        [
            ("fleet_admin", {"tenant": "acme"}, "role"),
            ("operator", {"role": "admin"}, "role"),
            ("fleet_admin", {"expires_at": None}, "expires_at"),
            ("fleet_admin", {"expires_at": "2999-01-01T00:00:00Z"}, "expires_at"),
            ("fleet_admin", {"role": "king"}, "role"),
        ],
    )
    def test_what_no_service_key_may_be(self, who, values, field, sign_in, acme, operations):
        within = (timezone.now() + timedelta(days=30)).isoformat()
        given = {"tenant": "operations", "name": "bot", "role": "operator", "expires_at": within} | values
        refused = sign_in(who).post("keys", **given)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)

    def test_by_rest_and_by_command(self, sign_in, operations, capsys):
        within = (timezone.now() + timedelta(days=30)).isoformat()
        made = sign_in("operator").post("keys", tenant="operations", name="bot", role="operator", expires_at=within)
        assert (made.status_code, made.json()["role"]) == (201, "operator")
        assert Event.objects.get(kind="api_key.created").after["role"] == "operator"
        call_command("create_key", "operations", "--name", "night", "--role", "viewer")
        secret = capsys.readouterr().out.strip()
        assert Caller(Client(), {"Authorization": f"Bearer {secret}"}).get("instances").status_code == 200
        call_command("keys")
        listed = capsys.readouterr().out
        assert "night  viewer over the fleet, until " in listed
        with pytest.raises(CommandError, match="Give --reason"):
            call_command("keys", "--revoke", secret[:11])
        call_command("keys", "--revoke", secret[:11], "--reason", "done")
        assert Caller(Client(), {"Authorization": f"Bearer {secret}"}).get("instances").status_code == 401
