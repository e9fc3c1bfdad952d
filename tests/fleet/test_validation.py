"""What the inventory does not accept, and that each refusal names its field."""

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    Launcher,
    Node,
    PerformanceProfile,
    Region,
    ScheduledMinimum,
    SloClass,
    SloKind,
)
from controlplane.fleet.selectors import schedules
from workers.tasks import fleet as tasks

pytestmark = pytest.mark.django_db


def errors(row):
    """Return the invalid fields; empty if *row* is valid, "__all__" for an error without a field."""
    try:
        row.full_clean()
    except ValidationError as error:
        return set(error.message_dict)
    return set()


class TestDeployment:
    @pytest.mark.parametrize(
        ("changes", "fields"),
        [
            ({}, set()),
            ({"min_instances": 3, "max_instances": 3}, set()),
            ({"min_instances": 4, "max_instances": 4}, set()),  # 4 x 2 GPUs are the node's 8
            ({"min_instances": 5, "max_instances": 9}, {"min_instances"}),
            ({"min_instances": 3, "max_instances": 2}, {"max_instances"}),
            ({"tensor_parallel": 16}, {"tensor_parallel"}),
            ({"tensor_parallel": 0}, {"tensor_parallel"}),
            ({"gpu_memory_utilization": 1.2}, {"gpu_memory_utilization"}),
            ({"tensor_parallel": 1, "gpu_memory_utilization": 0.15}, {"tensor_parallel"}),  # weights do not fit
            ({"max_num_seqs": 0}, {"max_num_seqs"}),
            ({"routing_policy": "best"}, {"routing_policy"}),
            ({"ordering_policy": "ssjf", "ordering_stretch": 0.0}, set()),
            ({"ordering_stretch": -1.0}, {"ordering_stretch"}),
            ({"vllm_args": "--enforce-eager"}, set()),
            ({"vllm_args": "--port 1"}, {"vllm_args"}),
            ({"vllm_args": "--port=1"}, {"vllm_args"}),
            ({"vllm_args": "--max_num_seqs 1"}, {"vllm_args"}),
            ({"environment": {"VLLM_USE": "1"}}, set()),
            ({"environment": {"not a name": "1"}}, {"environment"}),
            ({"environment": {"VLLM_USE": 1}}, {"environment"}),
            ({"environment": ["VLLM_USE"]}, {"environment"}),
            ({"secrets": {"VLLM_API_KEY": "x"}}, {"secrets"}),
            ({"api_key": "two words"}, {"api_key"}),
            ({"vllm_args": "eager"}, {"vllm_args"}),
            ({"vllm_args": "--name 'unclosed"}, {"vllm_args"}),
        ],
    )
    def test_fields(self, changes, fields, deployment):
        for name, value in changes.items():
            setattr(deployment, name, value)
        assert errors(deployment) == fields

    def test_orderings(self, deployment):
        """Instances go by priority unless they go by arrival; those of simulations alone say why they are refused."""
        for ordering in ("fcfs", "priority", "ssjf", "deadline", "slack"):
            deployment.ordering_policy = ordering
            assert deployment.scheduling_policy == ("fcfs" if ordering == "fcfs" else "priority")
        deployment.ordering_policy = "sjf"
        with pytest.raises(ValidationError, match="which only a simulation knows"):
            deployment.full_clean()

    @pytest.mark.sql
    def test_a_second_one_of_the_same_kind(self, deployment):
        with pytest.raises(IntegrityError), transaction.atomic():  # the database keeps bounds in order
            Deployment.objects.update(min_instances=9)
        deployment.pk = None
        deployment._state.adding = True
        assert errors(deployment) == {"gpu_type"}

    def test_the_kv_cache_holds_one_request_of_full_context(self, deployment):
        assert deployment.expected_kv_tokens == (2 * 80 * 2**30 * 0.9 - 16_060_000_000) // 131_072
        deployment.model.context_tokens = deployment.expected_kv_tokens
        assert errors(deployment) == set()
        deployment.model.context_tokens += 1
        assert errors(deployment) == {"tensor_parallel"}

    def test_without_nodes_hardware_is_not_judged(self, deployment, node):
        node.delete()
        deployment.tensor_parallel = 16
        assert errors(deployment) == set()


class TestInstance:
    @pytest.mark.parametrize(
        ("good", "urls"),
        [
            (
                True,
                "http://10.0.0.7:8000 https://vllm.example.com http://vllm-0:8000 http://[fd00::7]:8000 http://h:1/instance-1",
            ),
            (
                False,
                "ftp://10.0.0.7 file:///etc/passwd 10.0.0.7:8000 http:// http://10.0.0.7:8000/ http://10.0.0.7:8000/v1",
            ),
            (
                False,
                "http://h:1/v1/models http://user:secret@h:1 http://h:1?x=1 http://h:1#x http://h:99999 http://h:0",
            ),
            (False, "http://a\tb http://-x http://x\\y "),
        ],
    )
    def test_addresses(self, good, urls, make_instance):
        instance = make_instance(launcher=Launcher.EXTERNAL)
        for url in urls.split(" "):
            instance.url = url
            assert errors(instance) == (set() if good else {"url"}), url

    @pytest.mark.sql
    def test_one_living_instance_per_address(self, make_instance):
        first = make_instance(launcher=Launcher.EXTERNAL, url="http://10.0.0.7:8000")
        second = Instance(
            name="second",
            deployment=first.deployment,
            launcher=Launcher.EXTERNAL,
            url=first.url,
            state=InstanceState.READY,
        )
        assert errors(second) == {"url"}
        first.state = InstanceState.STOPPED
        first.save()
        assert errors(second) == set()

    def test_the_node_is_of_the_deployments_region_and_gpu_type(self, make_instance, node):
        instance = make_instance(node=node)
        assert errors(instance) == set()
        node.region = Region.objects.create(name="us-west", title="US West")
        node.save()
        assert errors(instance) == {"node"}
        node.region = instance.deployment.region
        node.gpu_type = GpuType.objects.create(
            name="h100", title="H100", memory_bytes=80 * 2**30, on_demand_usd_per_hour=3
        )
        node.save()
        assert errors(instance) == {"node"}

    @pytest.mark.sql
    def test_the_node_has_gpus_left(self, make_instance, node):
        for _ in range(4):
            last = make_instance(node=node)  # 4 x 2 GPUs of 8
        assert errors(last) == set()
        assert node.free_gpus() == 0
        assert errors(make_instance(node=node)) == {"node"}
        Instance.objects.filter(pk=last.pk).update(state=InstanceState.STOPPED)
        assert node.free_gpus() == 0  # the fifth has them now
        assert Node.objects.with_gpus_used().get().gpus_used == 8

    def test_launchers_need_a_profile_or_something_to_load(self, make_instance, profile):
        emulated, process = make_instance(), make_instance(launcher=Launcher.PROCESS)
        profile.delete()
        process.deployment.model.source = ""
        assert errors(emulated) == errors(process) == {"launcher"}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "org/model:v1", "a"],
         ["", "-x", "/x", "a b", "a\nb", 'a"b', "a,b", "ä"]),
        ("source", ["org/model"], ["--trust-remote-code", " x", "a\nb"]),
        ("weights_bytes", [1], [0]), ("kv_bytes_per_token", [1], [0]), ("context_tokens", [1], [0]),
    ],
)  # fmt: skip
def test_fields_of_models(field, good, bad, language_model):
    for value in (*good, *bad):
        setattr(language_model, field, value)
        assert errors(language_model) == ({field} if value in bad else set()), value


class TestSloClass:
    @pytest.mark.parametrize(
        ("values", "fields"),
        [
            ({"kind": SloKind.INTERACTIVE, "ttft_target_ms": 500}, set()),
            ({"kind": SloKind.INTERACTIVE}, {"ttft_target_ms"}),
            ({"kind": SloKind.NON_INTERACTIVE}, {"deadline_s"}),
            ({"kind": SloKind.NON_INTERACTIVE, "deadline_s": 3600}, set()),
            ({"kind": SloKind.OPPORTUNISTIC}, set()),
            ({"kind": SloKind.OPPORTUNISTIC, "percentile": 0.5}, {"percentile"}),
            ({"kind": SloKind.OPPORTUNISTIC, "percentile": 101}, {"percentile"}),
            ({"kind": SloKind.OPPORTUNISTIC, "price_factor": -1}, {"price_factor"}),
            ({"kind": SloKind.OPPORTUNISTIC, "deadline_s": 0}, {"deadline_s"}),
            ({"kind": SloKind.INTERACTIVE, "ttft_target_ms": 500, "e2e_target_ms": 400}, {"e2e_target_ms"}),
            ({"kind": SloKind.INTERACTIVE, "ttft_target_ms": 500, "service_tier": "priority"}, {"service_tier"}),
            ({"kind": "urgent", "ttft_target_ms": 500}, {"kind"}),
        ],
    )
    def test_fields(self, values, fields, slo_class):
        assert errors(SloClass(name="new", title="New", **values)) == fields


class TestScheduledMinimum:
    @pytest.mark.parametrize("time", ["08:30", "0830Z", "0830", "8:30", "24:00", "T0830", "08.30"])
    def test_times_are_of_the_clock(self, time, language_model):
        given = {"name": "office", "model": language_model, "instances": 1}
        for field in ("begins", "ends"):
            row = ScheduledMinimum(**given | {"begins": "08:00", "ends": "18:00", field: time})
            assert errors(row) == (set() if time == "08:30" else {field})

    def test_a_row_that_cannot_be_read_is_said_once_and_the_others_hold(self, deployment):
        for name, begins, count in (("old", "0830Z", 3), ("all day", "00:00", 2)):
            ScheduledMinimum.objects.create(
                name=name, model=deployment.model, instances=count, begins=begins, ends="00:00"
            )
        assert [each.minimum(1.7e9) for each in schedules().values()] == [2]
        services.report_unreadable()
        services.report_unreadable()
        (event,) = Event.objects.all()
        assert (event.subject, event.reason) == ("old", "begins: '0830Z' is not such as 08:30")


class TestOthers:
    def test_spot_is_not_dearer_than_on_demand(self, gpu_type):
        gpu_type.refresh_from_db()
        gpu_type.spot_usd_per_hour = gpu_type.on_demand_usd_per_hour * 2
        assert errors(gpu_type) == {"spot_usd_per_hour"}

    @pytest.mark.parametrize(
        ("address", "good"), [("10.0.0.7", True), ("gpu-1", True), ("http://x", False), ("x:1", False)]
    )
    def test_a_nodes_address_is_a_host(self, address, good, node):
        node.address = address
        assert errors(node) == (set() if good else {"address"})

    def test_a_node_keeps_room_for_what_runs_on_it(self, node, make_instance):
        make_instance(node=node)
        node.gpu_count = 1
        assert errors(node) == {"gpu_count"}
        node.gpu_count, node.region = 8, Region.objects.create(name="us-west", title="US West")
        assert errors(node) == {"region"}

    @pytest.mark.sql
    def test_profiles_are_unique_and_take_time(self, profile):
        profile.decode_a_s = 0.0
        assert errors(profile) == {"decode_a_s"}
        profile.decode_a_s, profile.prefill_t0_s, profile.prefill_a_s = 0.01, 0.0, -0.1
        assert errors(profile) == {"prefill_a_s"}
        profile.prefill_a_s = 0.1
        again = PerformanceProfile(
            model=profile.model, gpu_type=profile.gpu_type, tensor_parallel=2, prefill_a_s=1, decode_a_s=1, source="x"
        )
        again.prefill_b_s_per_token = 0.0
        assert errors(again) == {"tensor_parallel"}


class TestFlagsAskedOfVllm:
    """vLLM's own parser is asked when flags change; here a program stands in for it."""

    @pytest.fixture(autouse=True)
    def python(self, settings, tmp_path):
        program = tmp_path / "python"
        program.write_text(f"""#!/bin/sh
echo asked >> {tmp_path}/count
case "$2" in *--bad*) echo '{{"error": "unrecognized arguments: --bad"}}';; *) echo '{{"error": ""}}';; esac
""")
        program.chmod(0o755)
        settings.VLLM_PYTHON, settings.STATE_DIR = str(program), tmp_path

    def test_a_refusal_names_the_argument(self, deployment):
        deployment.vllm_args = "--bad 3"
        with pytest.raises(ValidationError) as refusal:
            deployment.full_clean()
        said = "vLLM does not take this: unrecognized arguments: --bad."
        assert refusal.value.message_dict == {"vllm_args": [said]}

    def test_it_is_asked_when_they_change_and_not_at_every_save(self, deployment, tmp_path):
        deployment.vllm_args = "--enforce-eager"
        deployment.full_clean()
        deployment.save()
        deployment.max_instances = 2
        deployment.full_clean()
        assert (tmp_path / "count").read_text().count("asked") == 1

    def test_a_start_is_refused_too(self, make_instance, deployment):
        """The worker has vLLM, even if the console does not."""
        Deployment.objects.update(vllm_args="--bad")
        command = services.start(make_instance(state=InstanceState.STOPPED, launcher=Launcher.PROCESS), "test", "x")
        tasks.run_command(command.pk)
        command.refresh_from_db()
        assert "vLLM does not take its further flags: unrecognized arguments: --bad" in command.error
        assert Instance.objects.get().state == InstanceState.FAILED


def test_cpus_have_a_separate_cache_size_and_no_gpus(make_instance, deployment, node, gpu_type, settings):
    gpu_type.device = "cpu"
    gpu_type.save()
    Deployment.objects.update(environment={"A": "1"}, secrets={"B": "2"}, api_key="token")
    spec = tasks.start_spec(Instance.objects.get(pk=make_instance(launcher=Launcher.PROCESS, node=node).pk))
    assert spec.gpus == 0
    assert spec.cpu_kv_bytes == pytest.approx(2 * 80 * 2**30 * 0.9 - 16_060_000_000, abs=131_072)
    assert (spec.environment, spec.api_key) == ({"A": "1", "B": "2"}, "token")
