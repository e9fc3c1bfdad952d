"""Shards: handed over only to a process that stands by, and models that belong together are in one."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet import shards
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.fleet_file import FleetFileError, apply, read
from controlplane.fleet.inventory.kinds import MODEL
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Instance, Model, Owner, SwapGroup

pytestmark = pytest.mark.django_db


def owner(number: int = 1, *, owned_s: float = 60.0, wanted_s: float | None = None, **values) -> Owner:
    """The row of a shard: owned for so many seconds more, and wanted by another process so many seconds ago."""
    now = timezone.now()
    wanted_at = None if wanted_s is None else now - timedelta(seconds=wanted_s)
    values = {"name": "gpu-a:17", "token": "a", "epoch": 4} | values
    expires_at = now + timedelta(seconds=owned_s)
    return Owner.objects.create(role=f"shard {number}", expires_at=expires_at, wanted_at=wanted_at, **values)


@pytest.fixture
def other(language_model):
    return Model.objects.create(
        name="other", title="Other", weights_bytes=1, kv_bytes_per_token=1, context_tokens=4096, shard=1
    )


class TestHandingOver:
    @pytest.mark.parametrize(
        ("row", "refused"),
        [
            ({"wanted_s": 1.0}, ""),
            ({}, "No process stands by for shard 1"),
            ({"wanted_s": 11.0}, "No process stands by for shard 1"),
            ({"wanted_s": 1.0, "owned_s": -1.0}, "Nobody owns shard 1"),
            ({"wanted_s": 1.0, "token": ""}, "Nobody owns shard 1"),
            ({"wanted_s": 1.0, "moves": True}, "hands shard 1 over already"),
        ],
    )
    def test_needs_an_owner_and_one_that_stands_by(self, operator, row, refused):
        made = owner(**row)
        if refused:
            with pytest.raises(ActionError, match=refused):
                shards.hand_over(made, operator, "new driver")
        else:
            shards.hand_over(made, operator, "new driver")
            event = Event.objects.get(kind="shard.moved")
            assert (event.user, event.reason, event.before) == (
                operator,
                "new driver",
                {"owner": "gpu-a:17", "epoch": 4},
            )
        assert Owner.objects.get().moves == (not refused or row.get("moves", False))

    def test_by_rest(self, acting, other):
        acting.get("/api/shards")  # which loads a lot
        made = owner(wanted_s=1.0)
        [item] = acting.get("/api/shards").json()["items"]
        assert (item["role"], item["name"], item["epoch"], item["stands_by"]) == ("shard 1", "gpu-a:17", 4, True)
        assert item["models"] == ["llama-3.1-8b", "other"]
        answer = acting.post(f"/api/shards/{made.pk}/hand-over", {"reason": "x"}, content_type="application/json")
        assert (answer.status_code, Owner.objects.get().moves) == (200, True)
        answer = acting.post(f"/api/shards/{made.pk}/hand-over", {"reason": "x"}, content_type="application/json")
        assert (answer.status_code, "over already" in answer.content.decode()) == (409, True)


class TestDealing:
    @pytest.fixture(params=["fallback", "falls back", "shares GPUs"])
    def bound(self, request, language_model, other, make_instance, deployment):
        """Two models that are in one shard, and how."""
        if request.param == "shares GPUs":
            group = SwapGroup.objects.create(name="g")
            make_instance(swap_group=group, state="sleeping")
            deployment.pk = None
            deployment.model = other
            deployment.save()
            make_instance(swap_group=group, state="sleeping", deployment=deployment)
        else:
            one, two = (language_model, other) if request.param == "fallback" else (other, language_model)
            Model.objects.filter(pk=one.pk).update(fallback=two)
        return Model.objects.get(pk=language_model.pk), request.param

    def test_a_model_goes_to_a_shard_that_there_is_or_the_next(self, language_model, other, operator):
        for shard in (2, 1):
            services.change(MODEL, language_model, {"shard": shard}, operator, "load")
        event = Event.objects.filter(kind="model.changed").latest("pk")
        assert (event.before, event.after, event.user) == ({"shard": 2}, {"shard": 1}, operator)
        with pytest.raises(ValidationError, match="no shard 2: the next new one is shard 2"):
            services.change(MODEL, language_model, {"shard": 3}, operator)
        owner(2)  # models were there
        services.change(MODEL, language_model, {"shard": 3}, operator)

    def test_not_without_what_it_belongs_to(self, bound, operator):
        model, how = bound
        with pytest.raises(
            ValidationError, match=f"other .*{how.split()[0][:4]}.* and is in shard 1, llama-3.1-8b in shard 2"
        ):
            services.change(MODEL, model, {"shard": 2}, operator)

    def test_together(self, bound, operator):
        model, _ = bound
        assert {row.name for row in services.deal(model, 2, operator, "load")} == {"llama-3.1-8b", "other"}
        assert set(Model.objects.values_list("shard", flat=True)) == {2}
        assert Event.objects.filter(kind="model.changed", reason="load").count() == 2

    def test_no_fallback_in_another_shard(self, language_model, other, operator):
        Model.objects.filter(pk=other.pk).update(shard=2)
        with pytest.raises(ValidationError, match="other is its fallback and is in shard 2"):
            services.change(MODEL, language_model, {"fallback": "other"}, operator)

    @pytest.mark.parametrize("bound", ["shares GPUs"], indirect=True)
    def test_no_shared_gpus_in_another_shard(self, bound, other):
        Model.objects.filter(pk=other.pk).update(shard=2)
        with pytest.raises(ValidationError, match=r"serves llama-3\.1-8b of shard 1; other is in shard 2"):
            Instance.objects.get(deployment__model=other).full_clean()

    def test_by_a_fleet_file_together(self, bound, operator, tmp_path):
        file = tmp_path / "fleet.toml"
        file.write_text('[[models]]\nname = "llama-3.1-8b"\nshard = 2\n')
        with pytest.raises(FleetFileError, match="change both together"):
            apply(read(file), operator)
        file.write_text(file.read_text() + '[[models]]\nname = "other"\nshard = 2\n')
        changed = apply(read(file), operator)
        assert [(change.label, change.values) for change in changed] == [
            (name, {"shard": (1, 2)}) for name in ("llama-3.1-8b", "other")
        ]

    def test_by_rest(self, client, fleet_admin, bound):
        client.force_login(fleet_admin)
        rows = [{"name": name, "shard": 2} for name in ("llama-3.1-8b", "other")]
        answer = client.patch("/api/inventory", {"models": rows[:1]}, content_type="application/json")
        assert (answer.status_code, "change both together" in answer.content.decode()) == (422, True)
        answer = client.patch("/api/inventory", {"models": rows}, content_type="application/json")
        assert answer.status_code == 200, answer.content
        assert {item["shard"] for item in client.get("/api/inventory/models").json()["items"]} == {2}
