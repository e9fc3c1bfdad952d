"""Keys and sign-in links."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.accounts import selectors, services
from controlplane.accounts.models import ApiKey, Role, SignInLink, Tenant, hash_secret
from controlplane.events.models import Event

pytestmark = pytest.mark.django_db


class TestKeys:
    def test_only_prefix_and_hash_are_stored(self, acme, operator):
        key, secret = services.create_api_key(acme, " laptop ", operator)
        assert secret.startswith("ph_")
        assert len(secret) >= 3 + 43  # 32 random bytes
        row = ApiKey.objects.get()
        assert (row.name, row.prefix, row.sha256) == ("laptop", secret[:11], hash_secret(secret))
        stored = str(list(ApiKey.objects.values())) + str(list(Event.objects.values()))
        assert secret not in stored
        assert row.sha256 not in str(list(Event.objects.values()))
        assert key.usable

    def test_secrets_differ(self, acme):
        secrets = {services.create_api_key(acme, "same", "test")[1] for _ in range(20)}
        assert len(secrets) == 20

    @pytest.mark.parametrize("name", ["", "  ", "x" * 81])
    def test_names(self, name, acme):
        with pytest.raises(ValidationError) as caught:
            services.create_api_key(acme, name, "test")
        assert set(caught.value.message_dict) == {"name"}
        assert not Event.objects.exists()

    def test_expiry(self, acme):
        with pytest.raises(ValidationError) as caught:
            services.create_api_key(acme, "laptop", "test", expires_at=timezone.now())
        assert set(caught.value.message_dict) == {"expires_at"}
        key, _ = services.create_api_key(acme, "laptop", "test", expires_at=timezone.now() + timedelta(hours=1))
        assert key.usable
        key.expires_at = timezone.now()
        assert not key.usable

    def test_an_inactive_tenant_gets_no_keys(self, acme):
        acme.active = False
        with pytest.raises(ValidationError) as caught:
            services.create_api_key(acme, "laptop", "test")
        assert set(caught.value.message_dict) == {"tenant"}

    @pytest.mark.sql
    def test_revoking(self, acme, operator):
        key, _ = services.create_api_key(acme, "laptop", operator)
        services.revoke_api_key(key, operator, "leaked")
        first = key.revoked_at
        services.revoke_api_key(key, operator, "again")
        assert key.revoked_at == first
        assert not ApiKey.objects.get().usable
        event = Event.objects.get(kind="api_key.revoked")
        assert (event.reason, event.user) == ("leaked", operator)


class TestSignInLinks:
    def test_once(self, member):
        token = services.create_sign_in_link(member)
        assert token not in str(list(SignInLink.objects.values())) + str(list(Event.objects.values()))
        assert services.use_sign_in_link(token) == member
        assert services.use_sign_in_link(token) is None
        assert list(Event.objects.order_by("pk").values_list("kind", flat=True)) == [
            "sign_in_link.created",
            "sign_in_link.used",
        ]

    def test_not_when_out_of_date_unknown_or_inactive(self, member):
        assert services.use_sign_in_link("guess") is None
        assert services.use_sign_in_link(services.create_sign_in_link(member, lifetime=timedelta(0))) is None
        token = services.create_sign_in_link(member)
        member.is_active = False
        member.save()
        assert services.use_sign_in_link(token) is None

    @pytest.mark.sql
    def test_of_two_at_the_same_time_one_succeeds(self, member, monkeypatch):
        """The second looks while the link is unused, and comes to claim it when it is used."""
        token = services.create_sign_in_link(member)
        real = services.timezone.now
        calls = iter([True])

        def now():
            if next(calls, False):  # the first call of the outer use: let another use go first
                moment = real()
                assert services.use_sign_in_link(token) == member
                return moment
            return real()

        monkeypatch.setattr(services.timezone, "now", now)
        assert services.use_sign_in_link(token) is None

    def test_the_command_prints_one(self, member, client, capsys):
        call_command("sign_in_link", "member", url="https://console.example/")
        link = capsys.readouterr().out.strip()
        assert link.startswith("https://console.example/sign-in/")
        assert services.use_sign_in_link(link.rstrip("/").rpartition("/")[2]) == member
        with pytest.raises(CommandError, match="Users: member"):
            call_command("sign_in_link", "nobody")
        with pytest.raises(CommandError, match="at least one minute"):
            call_command("sign_in_link", "member", minutes=0)


class TestWhoSeesWhat:
    def test_tenants(self, viewer, operator, member, stranger, acme, globex, make_user):
        everyone = set(Tenant.objects.all())
        assert set(selectors.visible_tenants(viewer)) == everyone
        assert set(selectors.visible_tenants(member)) == {acme}
        assert set(selectors.visible_tenants(stranger)) == {globex}
        assert not selectors.visible_tenants(make_user("new")).exists()
        assert set(selectors.tenants_with_managed_keys(operator)) == everyone
        assert not selectors.tenants_with_managed_keys(viewer).exists()
        assert not selectors.tenants_with_managed_keys(member).exists()
        assert set(selectors.tenants_with_managed_keys(stranger)) == {globex}

    def test_keys(self, viewer, key_manager, member, stranger, acme, make_user):
        services.create_api_key(acme, "laptop", "test")
        for user, sees, manages in ((viewer, 1, 0), (key_manager, 1, 1), (member, 1, 0), (stranger, 0, 0)):
            assert selectors.visible_api_keys(user).count() == sees, user
            assert selectors.manageable_api_keys(user).count() == manages, user

    def test_inactive_people_see_nothing(self, operator):
        operator.is_active = False
        assert not selectors.visible_tenants(operator).exists()
        assert not operator.has_fleet_role(Role.VIEWER)

    def test_the_highest_role_counts(self, make_user, operations):
        user = make_user("two-hats", operations, Role.VIEWER)
        other = Tenant.objects.create(name="ops-2", operates_fleet=True, default_slo_class=operations.default_slo_class)
        user.memberships.create(tenant=other, role=Role.ADMIN)
        assert user.fleet_role() == Role.ADMIN
        assert make_user("root", is_superuser=True).fleet_role() == Role.ADMIN
        assert make_user("nobody").fleet_role() is None

    @pytest.mark.sql
    def test_one_membership_per_tenant(self, member, acme):
        with pytest.raises(ValidationError) as caught:
            member.memberships.model(user=member, tenant=acme, role=Role.ADMIN).full_clean()
        assert set(caught.value.message_dict) == {"tenant"}
