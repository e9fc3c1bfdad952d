"""GPUs that fail are cordoned, with what follows for placement, capacity, alerts and the models that ran there."""

import pytest
from django.utils import timezone

from controlplane.alerts.conditions import problems_of
from controlplane.alerts.models import AlertRule, Condition
from controlplane.alerts.problems import find, read_known
from controlplane.events.models import Event, Severity
from controlplane.fleet import places, selectors, services
from controlplane.fleet.lifecycle import gpu_health, restarts
from controlplane.fleet.lifecycle.launching import start_spec
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Gpu, Instance, Launcher, Model, Node
from controlplane.planning.execution import executor
from controlplane.planning.models import MoveSource
from tests.fleet.test_hosts import Started
from workers.tasks import fleet as tasks
from workers.vllm.gpu_faults import Blame, Verdict, judge
from workers.vllm.launcher import LaunchError, _free_gpus

pytestmark = pytest.mark.django_db
S = InstanceState
SUSPECT = Verdict(Blame.SUSPECT, ("0",), "RuntimeError: CUDA error: unspecified launch failure")
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.fixture
def fails(make_instance, node, deployment):
    """`fails(model, verdict)`: a start of another model on GPU 0 of the node fails; return the instance."""
    one = {"tensor_parallel": 1, "gpu_memory_utilization": 0.9}
    Deployment.objects.filter(pk=deployment.pk).update(**one)

    def fail(name, verdict=SUSPECT, before=S.LOADING, gpus=("0",)):
        model = Model.objects.filter(name=name).first()
        if model is None:
            values = {"weights_bytes": 10**9, "kv_bytes_per_token": 1000, "context_tokens": 100, "source": "a/b"}
            model = Model.objects.create(name=name, title=name, **values)
        of, _ = Deployment.objects.get_or_create(model=model, region=node.region, gpu_type=node.gpu_type)
        row = make_instance(deployment=of, state=before, launcher=Launcher.PROCESS, node=node, gpus=list(gpus))
        services.move(row, S.FAILED, actor="test", reason="it ended")
        return row, gpu_health.judge(row, verdict)

    return fail


def test_one_failed_start_accuses_no_gpu_and_two_of_one_model_neither(fails):
    assert [fails("a")[1], fails("a")[1]] == [False, False]
    assert Gpu.objects.get().cordoned == ""


def test_failed_starts_of_two_models_do(fails, node):
    first, _ = fails("a")
    second, guilty = fails("b")
    assert guilty
    gpu = Gpu.objects.get(node=node, name="0")
    assert "starts of a and b failed on it" in gpu.cordoned
    event = Event.objects.get(kind="gpu.cordoned")
    assert (event.subject, event.severity) == ("GPU 0 of node-1", Severity.CRITICAL)
    for row in (first, second):  # neither model waits
        row.refresh_from_db()
        assert (row.failures, restarts.due_at(row)) == (0, row.state_changed_at)


def test_a_start_that_succeeds_clears_it(fails, make_instance, node):
    fails("a")
    row = make_instance(state=S.LOADING, launcher=Launcher.PROCESS, node=node, gpus=["0"])
    services.move(row, S.READY, actor="test", reason="it answers")
    assert not fails("b")[1]


def test_a_server_that_served_is_no_failed_start(fails):
    assert not fails("a", before=S.READY)[1]
    assert not Gpu.objects.exists()


def test_last_words_that_name_it_are_enough(fails):
    row, guilty = fails("a", judge(ECC, ["0"]), before=S.READY)
    assert guilty
    assert "uncorrectable ECC" in Gpu.objects.get().cordoned
    row.refresh_from_db()
    assert (row.failures, row.gpus) == (0, [])
    assert not gpu_health.judge(row, judge(ECC, ["0"]))  # once


def test_another_error_is_the_models(fails):
    row, guilty = fails("a", Verdict(Blame.OTHER, (), "ValueError: no such model"))
    assert not guilty
    row.refresh_from_db()
    assert row.failures == 1


class TestACordonedGpu:
    @pytest.fixture
    def gpu(self, fails, node):
        type(node).objects.filter(pk=node.pk).update(gpu_count=2)
        node.gpu_count = 2
        self.failed, _ = fails("a", judge(ECC, ["0"]))
        return Gpu.objects.get()

    def test_is_less_capacity_everywhere(self, gpu, node):
        assert node.free_gpus() == 1  # the failed instance claims none on top of it
        assert node.free_gpus(without=self.failed) == 1
        assert places.plannable_gpus(node) == 1
        assert selectors.gpus_fitted() == {("us-east", "a100-80gb"): 1}
        assert selectors.nodes().get().gpus_cordoned == 1

    def test_is_given_to_no_start(self, gpu, node):
        spec = start_spec(self.failed)
        assert (spec.cordoned_gpus, _free_gpus(spec, set())) == (("0",), ("1",))
        with pytest.raises(LaunchError, match="1 cordoned"):
            _free_gpus(spec, {"1"})

    def test_a_suspect_one_is_given_last(self, gpu, node):
        Gpu.objects.update(cordoned="")
        assert _free_gpus(start_spec(self.failed), set()) == ("1",)

    def test_leaves_its_instance_to_other_nodes_where_there_is_no_other_gpu(self, gpu, node, make_instance):
        other = self.failed.deployment
        make_instance(deployment=other, launcher=Launcher.PROCESS, node=node, gpus=["1"])
        assert not places.keeps(self.failed)
        with pytest.raises(places.NoRoom):
            places.pick(other)

    def test_counts_as_used_while_a_server_has_it(self, gpu, node, make_instance):
        make_instance(deployment=self.failed.deployment, launcher=Launcher.PROCESS, node=node, gpus=["0"])
        assert node.cordoned_gpus() == set()

    def test_is_a_problem_that_opens_an_alert(self, gpu):
        [problem] = find({}, read_known(timezone.now()))
        assert (problem.kind, problem.subject, problem.severity) == ("gpu", "GPU 0 of node-1", "critical")
        rule = AlertRule(name="r", condition=Condition.INSTANCE)
        assert problems_of(rule, timezone.now(), [problem]) == [problem]

    def test_is_put_back_with_one_click(self, gpu, acting, client, operator):
        client.force_login(operator)
        page = client.get("/fleet/nodes/node-1/").content.decode()
        assert "GPU 0 of node-1" in page
        assert f"/operations/gpus/{gpu.pk}/uncordon/" in page
        [item] = acting.get("/api/gpus").json()["items"]
        assert "uncorrectable ECC" in item["failed_starts"]["a"]
        answer = acting.post(f"/api/gpus/{gpu.pk}/uncordon", {"reason": "replaced"}, content_type="application/json")
        assert answer.status_code == 200, answer.content
        gpu.refresh_from_db()
        assert (gpu.cordoned, gpu.failed_starts) == ("", {})
        assert Event.objects.filter(kind="gpu.uncordoned").exists()
        assert find({}, read_known(timezone.now())) == ()


def test_who_starts_again_before_anyone_has_judged_is_judged_then(fails, node):
    row, _ = fails("a", Verdict(Blame.OTHER))
    Instance.objects.filter(pk=row.pk).update(gpus=["0"], state=S.PROVISIONING)
    assert gpu_health.judge(row, judge(ECC, ["0"]))


def test_the_start_that_a_gpu_failed_is_retried_on_another_node_at_once(
    make_instance, node, deployment, tmp_path, settings, monkeypatch
):
    """Its host judges the log, ends what is left and gives the instance free; the floor has no reason to wait."""
    settings.HOST, launcher = "gpu-a", Started()
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: launcher)
    Deployment.objects.update(tensor_parallel=1, gpu_memory_utilization=0.9, max_instances=1)
    Node.objects.update(gpu_count=1)
    other = Node.objects.create(name="node-2", region=node.region, gpu_type=node.gpu_type, gpu_count=1)
    row = make_instance(state=S.LOADING, launcher=Launcher.PROCESS, node=node, host="gpu-a", gpus=["0"], failures=2)
    services.move(row, S.FAILED, actor="gateway", reason="no answer")
    launcher.records, launcher.is_alive = {row.name: "its record"}, False
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{ECC}\n")
    launcher.log_file, launcher.is_gone = lambda name: tmp_path / "log", lambda name: True
    place = deployment.model.name, deployment.region.name
    why = executor.Why(MoveSource.FLOOR, "floor", "below its minimum", {})
    with pytest.raises(executor.Refused):
        executor.add(*place, why)  # a crash loop, for all that is known
    assert tasks.end_failed() == 1
    move = executor.add(*place, why)
    row.refresh_from_db()
    assert (move.instance, row.state, row.node, row.host) == (row.name, S.PROVISIONING, other, "")
