"""Admin of instances: no state by hand, nothing alive is deleted."""

import re

import pytest
from django.urls import reverse

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.inventory.kinds import REGION
from controlplane.fleet.inventory.services import change
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, InstanceCommand

pytestmark = pytest.mark.django_db
S = InstanceState
LIST, ADD = "admin:fleet_instance_changelist", "admin:fleet_instance_add"


def act(client, action, *instances, **values):
    return client.post(
        reverse(LIST), {"action": action, "_selected_action": [row.pk for row in instances], **values}, follow=True
    )


class TestRows:
    @pytest.mark.parametrize(("launcher", "fields"), [("emulated", "node"), ("external", "node url kv_events")])
    def test_state_and_identity_are_not_edited_by_hand(self, as_admin, make_instance, launcher, fields):
        instance = make_instance(launcher=launcher)
        page = as_admin.get(reverse("admin:fleet_instance_change", args=[instance.pk]))
        assert list(page.context["adminform"].form.fields) == fields.split()

    def test_a_new_one_is_started(self, as_admin, deployment, node):
        values = {"name": "new", "deployment": deployment.pk, "node": node.pk, "launcher": "emulated", "url": ""}
        response = as_admin.post(reverse(ADD), values)
        assert response.status_code == 302
        assert InstanceCommand.objects.get().verb == "start"
        assert Instance.objects.get().state == S.PROVISIONING

    def test_a_registered_one_is_looked_for(self, as_admin, deployment):
        values = {"name": "new", "deployment": deployment.pk, "launcher": "external", "url": "http://vllm-0:8000"}
        as_admin.post(reverse(ADD), values)
        assert Instance.objects.get().state == S.LOADING
        assert not InstanceCommand.objects.exists()

    def test_only_stopped_ones_are_deleted(self, as_admin, make_instance):
        alive, stopped = make_instance(), make_instance(state=S.STOPPED)
        act(as_admin, "delete_selected", alive, stopped, post="yes")
        assert Instance.objects.count() == 2
        as_admin.post(reverse("admin:fleet_instance_delete", args=[alive.pk]), {"post": "yes"})
        assert Instance.objects.count() == 2
        InstanceCommand.objects.create(instance=stopped, verb="stop", actor="x", state="done")
        as_admin.post(reverse("admin:fleet_instance_delete", args=[stopped.pk]), {"post": "yes"})
        assert Instance.objects.get() == alive
        assert Event.objects.get(kind="instance.deleted").subject == "instance-2"

    def test_what_another_changed_meanwhile_is_said_before_it_is_overwritten(self, as_admin, region):
        path = reverse("admin:fleet_region_change", args=[region.pk])
        values = {"name": "us-east", "title": "Mine", "active": "on"}
        drawn = as_admin.get(path).context["drawn_after"]
        change(REGION, region, {"title": "Theirs"}, "alice")
        services.cordon(region, "bob", "no field of this form")
        page = as_admin.post(path, values | {"drawn_after": drawn})
        said = "Nothing was saved: since this was read, alice changed title from US East to Theirs at "
        assert [text[: len(said)] for text in page.context["adminform"].form.non_field_errors()] == [said]
        region.refresh_from_db()
        assert region.title == "Theirs"
        (again,) = re.findall(r'name="drawn_after" value="(\d+)"', page.content.decode())
        assert as_admin.post(path, values | {"drawn_after": again}).status_code == 302
        region.refresh_from_db()
        assert region.title == "Mine"


class TestSecrets:
    def values(self, deployment, **changes):
        form = self.page.context["adminform"].form
        fields = {name: form.initial.get(name) for name in form.fields}
        plain = {name: value for name, value in fields.items() if value is not False and value not in (None, "", {})}
        return {**plain, "environment": "{}", "secrets": "", "api_key": "", **changes}

    @pytest.fixture(autouse=True)
    def opened(self, as_admin, deployment):
        deployment.secrets, deployment.api_key = {"HF_TOKEN": "hidden-1"}, "hidden-2"
        deployment.save()
        self.path = reverse("admin:fleet_deployment_change", args=[deployment.pk])
        self.page = as_admin.get(self.path)

    def saved(self, as_admin, deployment, **changes):
        response = as_admin.post(self.path, self.values(deployment, **changes))
        assert response.status_code == 302, response.context["adminform"].form.errors
        deployment.refresh_from_db()
        return deployment.secrets, deployment.api_key

    def test_they_are_named_and_not_shown(self, as_admin):
        text = self.page.content.decode()
        assert "api_key, HF_TOKEN" in text
        assert "hidden-" not in text

    def test_empty_fields_keep_them_others_take_their_place_and_events_have_marks_alone(self, as_admin, deployment):
        assert self.saved(as_admin, deployment, max_instances=2) == ({"HF_TOKEN": "hidden-1"}, "hidden-2")
        assert Event.objects.get(kind="deployment.changed").after == {"max_instances": 2}
        secrets, token = self.saved(as_admin, deployment, secrets='{"OTHER": "hidden-3"}', api_key="hidden-4")
        assert (secrets, token) == ({"OTHER": "hidden-3"}, "hidden-4")
        event = Event.objects.filter(kind="deployment.changed").latest("pk")
        assert {"secrets", "api_key"} <= set(event.after)
        assert "hidden-" not in f"{event.before}{event.after}"
        assert self.saved(as_admin, deployment, secrets="{}", api_key="-") == ({}, "")

    def test_a_mistake_is_shown_at_its_field_and_a_typed_secret_is_not_lost(self, as_admin, deployment):
        response = as_admin.post(self.path, self.values(deployment, secrets='{"HF_TOKEN": 1}'))
        assert set(response.context["adminform"].form.errors) == {"secrets"}
        assert "&quot;HF_TOKEN&quot;: 1" in response.content.decode()

    def test_viewers_see_their_names_alone(self, reader):
        text = reader.get(self.path).content.decode()
        assert "HF_TOKEN" in text
        assert "hidden-" not in text
