"""`/api`: who reads the inventory, and what operators do to instances."""

import re

import pytest

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandVerb, InstanceCommand

pytestmark = pytest.mark.django_db


def error(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "field"}
    return body["error"]


class TestWhoSees:
    def test_the_anonymous_answer_says_how_to_sign_in(self, anonymous):
        response = anonymous.get("instances")
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert error(response)["code"] == "not_authenticated"

    def test_a_key_of_the_tenant_that_operates_the_fleet_reads_it(self, with_key, operations, acme):
        """E3: a valid key was answered with 401, "send a valid API key"."""
        for path in ("instances", "deployments"):
            assert with_key(operations).get(path).status_code == 200, path
        assert with_key(operations).get("summary").status_code == 503, "without Redis, which it is read from"
        assert with_key(acme).get("instances").status_code == 403

    def test_an_inactive_user_has_no_rights(self, sign_in, operator):
        caller = sign_in("operator")
        operator.is_active = False
        operator.save()
        assert caller.get("instances").status_code == 401


class TestInstances:
    def test_a_row_has_names_not_numbers(self, sign_in, make_instance, node):
        make_instance(node=node, kv_capacity_tokens=1000)
        item = sign_in("viewer").get("instances").json()["items"][0]
        assert item | {"state_changed_at": 0, "created_at": 0} == {
            "name": "instance-1",
            "model": "llama-3.1-8b",
            "region": "us-east",
            "gpu_type": "a100-80gb",
            "tensor_parallel": 2,
            "node": "node-1",
            "gpus": [],
            "launcher": "emulated",
            "url": "http://127.0.0.1:8100/instance-1",
            "kv_events": "",
            "state": "ready",
            "state_reason": "",
            "state_changed_at": 0,
            "startup": "",
            "kv_capacity_tokens": 1000,
            "host": "",
            "failures": 0,
            "held": "",
            "restart": "",
            "tier": "gpu",
            "swap_group": None,
            "outdated": [],
            "created_at": 0,
        }

    def test_many_instances_take_as_many_queries_as_one(self, sign_in, make_instance, django_assert_num_queries):
        caller = sign_in("viewer")
        for _ in range(10):
            make_instance()
        with django_assert_num_queries(4):  # session, user, role, instances
            caller.get("instances")
        with django_assert_num_queries(4):
            caller.get("deployments")

    def test_detail_lists_the_possible_actions(self, sign_in, make_instance):
        instance = make_instance()
        InstanceCommand.objects.create(instance=instance, verb=CommandVerb.START, actor="x", state="done")
        detail = sign_in("viewer").get("instances/instance-1").json()
        assert detail["possible_actions"] == ["drain", "stop", "restart", "sleep"]
        assert [command["verb"] for command in detail["commands"]] == ["start"]


class TestActions:
    def test_drain_and_resume(self, sign_in, make_instance, operator):
        instance = make_instance()
        caller = sign_in("operator")
        response = caller.post("instances/instance-1/drain", reason="new driver")
        assert response.status_code == 200
        assert response.json() == {"message": "instance-1 is draining"}
        instance.refresh_from_db()
        assert instance.state == InstanceState.DRAINING
        event = Event.objects.get(kind="instance.moved")
        assert (event.user, event.reason) == (operator, "new driver")
        assert caller.post("instances/instance-1/resume", reason="done").status_code == 200
        instance.refresh_from_db()
        assert instance.state == InstanceState.READY

    def test_an_action_that_does_not_fit_is_a_conflict_that_explains_itself(self, sign_in, make_instance):
        make_instance(state=InstanceState.STOPPED)
        response = sign_in("operator").post("instances/instance-1/drain", reason="x")
        assert response.status_code == 409
        assert error(response)["message"] == "instance-1 is stopped: drain is for an instance that is ready"


class TestLog:
    @pytest.fixture(autouse=True)
    def log(self, make_instance, settings, tmp_path):
        settings.STATE_DIR = tmp_path
        (tmp_path / "instances").mkdir()
        make_instance(name="p", launcher="process", state=InstanceState.FAILED, engine={"version": "0.32.0"})
        text = "Traceback (most recent call last):\n  File x\nValueError: too small\nlast\n"
        (tmp_path / "instances/p.log").write_text(text)

    def test_the_last_lines_and_the_error(self, sign_in, tmp_path):
        answer = sign_in("operator").get("instances/p/log", lines=2).json()
        assert answer["lines"] == ["ValueError: too small", "last"]
        assert answer["error"] == "ValueError: too small"
        assert answer["file"] == str(tmp_path / "instances/p.log")
        assert sign_in("operator").get("instances/p").json()["engine"] == {"version": "0.32.0"}

    def test_a_server_started_elsewhere_has_none(self, sign_in, make_instance):
        make_instance(name="e", launcher="external")
        assert sign_in("operator").get("instances/e/log").json() == {"lines": [], "file": "", "host": "", "error": ""}


def test_unknown_paths_and_broken_json_have_the_same_body(sign_in, make_instance, operator):
    caller = sign_in("operator")
    assert error(caller.get("nothing/here"))["code"] == "not_found"
    make_instance()
    response = caller.client.post("/api/instances/instance-1/drain", b"{", content_type="application/json")
    assert response.status_code == 400
    assert error(response)["code"] == "bad_request"


@pytest.mark.parametrize(
    ("path", "query", "known"),
    [("v1/usage", {"hours": "x"}, "since"), ("requests", {"page": -1}, "cursor"), ("me", {"page": 1}, "takes none")],
)
def test_a_parameter_that_a_path_does_not_have_is_refused(sign_in, anonymous, operator, path, query, known):
    refused = sign_in("operator").get(path, **query)
    (name,) = query
    assert (refused.status_code, error(refused)["field"]) == (422, name)
    assert re.search(rf"'{name}'.*{known}", error(refused)["message"])
    assert anonymous.get(path, **query).status_code == 401
