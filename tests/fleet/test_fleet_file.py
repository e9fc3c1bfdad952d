"""`manage.py apply FLEET.toml`: what it makes, shows, refuses and leaves alone."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.inventory import model_source
from controlplane.fleet.models import (
    Adapter,
    Deployment,
    Device,
    GpuType,
    Instance,
    InstanceCommand,
    Model,
    Node,
    Region,
    SloClass,
    WeightedTarget,
)
from controlplane.fleet.selectors import region_latencies_ms
from workers.vllm.model_shape import ShapeError

pytestmark = pytest.mark.django_db

OFFICE = """[[schedules]]
name = "office"
model = "tiny"
instances = 1
begins = "0830Z"
ends = "18:00"
"""
FLEET = """
[[regions]]
name = "here"
title = "Here"

[[gpu_types]]
name = "cpu"
title = "CPU"
device = "cpu"
memory_bytes = 4_000_000_000
on_demand_usd_per_hour = 0.05

[[nodes]]
name = "machine"
region = "here"
gpu_type = "cpu"
gpu_count = 2

[[models]]
name = "tiny"
source = "/models/tiny"
weights_bytes = 1_000_000
kv_bytes_per_token = 512
context_tokens = 4096

[[slo_classes]]
name = "interactive"
title = "Interactive"
kind = "interactive"
ttft_target_ms = 2000

[[tenants]]
name = "acme"
slo_classes = ["interactive"]
default_slo_class = "interactive"

[[deployments]]
model = "tiny"
region = "here"
gpu_type = "cpu"
max_instances = 2
environment = { VLLM_CPU_KVCACHE_SPACE = "1" }
secrets = { HF_TOKEN = "${A_TOKEN}" }
api_key = "${AN_API_KEY}"

[[instances]]
name = "tiny-1"
model = "tiny"
region = "here"
launcher = "process"
node = "machine"
"""
KINDS = (Region, GpuType, Node, Model, SloClass, Tenant, Deployment, Instance)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(text, "--yes")`: what the command prints for a file of *text*."""
    monkeypatch.setenv("A_TOKEN", "hf_secret")
    monkeypatch.setenv("AN_API_KEY", "key-secret")
    path = tmp_path / "FLEET.toml"

    def apply(text, *options):
        path.write_text(text)
        out = StringIO()
        call_command("apply", str(path), *options, stdout=out)
        return out.getvalue()

    return apply


def counts():
    return [kind.objects.count() for kind in KINDS]


def test_everything_is_made_in_the_right_order_and_the_instance_is_started(run):
    run(FLEET, "--yes")
    assert counts() == [1] * len(KINDS)
    deployment = Deployment.objects.get()
    assert deployment.gpu_type.device == Device.CPU
    assert (deployment.secrets, deployment.api_key) == ({"HF_TOKEN": "hf_secret"}, "key-secret")
    assert list(Tenant.objects.get().slo_classes.all()) == [SloClass.objects.get()]
    assert InstanceCommand.objects.get().verb == "start"
    created = {event.kind for event in Event.objects.filter(actor="apply", kind__endswith=".created")}
    assert len(created) == len(KINDS)


def test_a_second_time_changes_nothing(run):
    run(FLEET, "--yes")
    before = Event.objects.count()
    assert "Nothing to change" in run(FLEET)
    assert Event.objects.count() == before


def test_a_difference_is_shown_before_it_is_made(run):
    run(FLEET, "--yes")
    changed = FLEET.replace("max_instances = 2", "max_instances = 1").replace('title = "Here"', 'title = "There"')
    shown = run(changed, "--dry-run")
    assert "~ region here\n    title: Here -> There\n" in shown
    assert "~ deployment tiny/here/cpu\n    max_instances: 2 -> 1\n" in shown
    assert "0 to create, 2 to change, 0 to delete." in shown
    assert Region.objects.get().title == "Here"
    run(changed, "--yes")
    assert (Region.objects.get().title, Deployment.objects.get().max_instances) == ("There", 1)


def test_what_the_file_does_not_name_stays(run):
    run(FLEET, "--yes")
    Deployment.objects.update(queue_bound=7)
    Region.objects.create(name="elsewhere", title="Elsewhere")
    assert "Nothing to change" in run(FLEET)
    assert Deployment.objects.get().queue_bound == 7


def test_secrets_are_never_shown(run, monkeypatch):
    shown = run(FLEET, "--yes")
    monkeypatch.setenv("AN_API_KEY", "another-secret")
    shown += run(FLEET, "--yes")
    assert "~ deployment tiny/here/cpu\n    api_key: set (" in shown
    assert "secret" not in shown.replace("secrets: {HF_TOKEN: set (", "")
    for event in Event.objects.filter(subject_type="deployment"):
        assert "-secret" not in f"{event.before} {event.after}"
    assert Deployment.objects.get().api_key == "another-secret"


def test_without_a_callee_nothing_is_done(run):
    with pytest.raises(CommandError, match="add --yes"):
        run(FLEET)
    assert counts() == [0] * len(KINDS)


@pytest.mark.sql
def test_prune_deletes_what_the_file_no_longer_names(run):
    run(FLEET, "--yes")
    Region.objects.create(name="elsewhere", title="Elsewhere")
    Tenant.objects.create(name="globex", default_slo_class=SloClass.objects.get())
    shown = run(FLEET, "--prune", "--yes")
    assert "- region elsewhere\n" in shown
    assert [row.name for row in Region.objects.all()] == ["here"]
    assert Tenant.objects.count() == 2  # its keys and history stay


def test_prune_spares_kinds_without_a_table(run):
    run(FLEET, "--yes")
    assert "Nothing to change" in run(FLEET.partition("[[gpu_types]]")[0], "--prune", "--yes")


def test_prune_does_not_delete_an_instance_that_may_run(run):
    run(FLEET, "--yes")
    other = FLEET.replace('name = "tiny-1"', 'name = "tiny-2"')
    with pytest.raises(CommandError, match="instance tiny-1: tiny-1 is provisioning: stop it first"):
        run(other, "--prune", "--yes")
    assert [row.name for row in Instance.objects.all()] == ["tiny-1"]


@pytest.mark.sql
def test_an_error_in_the_last_table_leaves_nothing_behind(run):
    with pytest.raises(CommandError):
        run(FLEET.replace('node = "machine"', 'node = "nowhere"'), "--yes")
    assert counts() == [0] * len(KINDS)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[regions]]", "[[region]]", "there is no table region"),
        ("[[regions]]", "[regions]", r"regions is a list of tables: write \[\[regions\]\]"),
        ('title = "Here"', "title = ", "Invalid value .at line 4"),
        ('title = "Here"', "title = " + "[" * 5_000, "maximum recursion depth"),
        ('title = "Here"', r'title = "He\u0000re"', "line 4 holds a NUL character"),
        ('title = "Here"', 'titel = "Here"', r"regions\[1\] \(here\): titel: there is no such key"),
        ("[[regions]]", f"{OFFICE}\n[[regions]]", r"schedules\[1\] \(office\): begins: '0830Z' is not such as 08:30"),
        ("gpu_count = 2", "", r"nodes\[1\] \(machine\): gpu_count: this key is missing"),
        ("gpu_count = 2", 'gpu_count = "two"', r"nodes\[1\] \(machine\): gpu_count: Input should be a valid integer"),
        ("gpu_count = 2", "gpu_count = 0", r"nodes\[1\] \(machine\): gpu_count: Ensure this value"),
        (
            'region = "here"\ngpu_type = "cpu"\ngpu',
            'region = "nope"\ngpu_type = "cpu"\ngpu',
            "region: There is no region",
        ),
        ("max_instances = 2", "max_instances = 0", "max_instances: Not below the minimum of 1"),
        ("max_instances = 2", 'vllm_args = "--model x"', "vllm_args: Pilothouse sets --model"),
        ("VLLM_CPU_KVCACHE_SPACE =", "VLLM_API_KEY =", "environment: Pilothouse sets VLLM_API_KEY itself"),
        ("${A_TOKEN}", "${NO_TOKEN}", r"secrets.HF_TOKEN: the environment variable NO_TOKEN is not set"),
        ('default_slo_class = "interactive"', 'default_slo_class = "x"', "There is no SLO class 'x'"),
        ('slo_classes = ["interactive"]', "", "default_slo_class: Interactive is not among the classes"),
        (
            'model = "tiny"\nregion = "here"\nlauncher',
            'model = "big"\nregion = "here"\nlauncher',
            "no deployment big/here",
        ),
        ('launcher = "process"', 'launcher = "emulated"', "launcher: An emulated instance needs a performance profile"),
        ("weights_bytes = 1_000_000\n", "", "source: The config.json of /models/tiny cannot be read"),
        (
            "[[gpu_types]]",
            '[[regions]]\nname = "here"\n[[gpu_types]]',
            r"regions\[2\] \(here\): it is in .*regions\[1\]",
        ),
    ],
)
def test_a_mistake_names_file_table_and_key(old, new, said, run, monkeypatch):
    def read(source, context_tokens):
        raise ShapeError(f"The config.json of {source} cannot be read")

    monkeypatch.setattr(model_source, "read", read)  # tests/workers/test_model_shape.py reads real ones
    assert old in FLEET
    with pytest.raises(CommandError, match=said) as refusal:
        run(FLEET.replace(old, new), "--yes")
    assert "FLEET.toml: " in str(refusal.value)
    assert counts() == [0] * len(KINDS)


def test_what_an_instance_was_created_with_is_not_changed(run):
    run(FLEET, "--yes")
    with pytest.raises(CommandError, match=r"instances\[1\] \(tiny-1\): launcher: This is fixed"):
        run(FLEET.replace('launcher = "process"', 'launcher = "external"'), "--yes")


def test_latencies_between_regions_are_columns(run):
    there = '[[regions]]\nname = "there"\ntitle = "There"\nlatency_ms = {here = 12.5}\n'
    assert "+ region there" in run(FLEET + there, "--yes")
    assert region_latencies_ms() == {("there", "here"): 12.5}
    assert "latency_ms: {here: 12.5} -> {here: 20.0}" in run(FLEET + there.replace("12.5", "20"), "--yes")
    for wrong, words in (("{there = 1}", "Name another region"), ("{here = -1}", "here: from 0 to 60,000 ms")):
        with pytest.raises(CommandError, match=words):
            run(FLEET + there.replace("{here = 12.5}", wrong), "--yes")


SHARED = """
[[models]]
name = "large"
weights_bytes = 1_000_000
kv_bytes_per_token = 512
context_tokens = 4096
fallback = "tiny"
fallback_wait_s = 5

[[weighted_targets]]
name = "chat"
target = "large"
weight = 9

[[weighted_targets]]
name = "chat"
target = "tiny"
"""


def test_models_have_fallbacks_and_names_are_shared(run):
    run(FLEET + SHARED, "--yes")
    large = Model.objects.select_related("fallback").get(name="large")
    assert (large.fallback.name, large.fallback_wait_s) == ("tiny", 5.0)
    weights = WeightedTarget.objects.filter(name="chat").values_list("target", "weight")
    assert dict(weights) == {"large": 9.0, "tiny": 1.0}
    events = Event.objects.count()
    run(FLEET + SHARED, "--yes")
    assert Event.objects.count() == events
    with pytest.raises(CommandError, match="There is no model or adapter 'nothing'"):
        run(FLEET + SHARED.replace('target = "tiny"', 'target = "nothing"'), "--yes")
    run(FLEET + SHARED.replace('[[weighted_targets]]\nname = "chat"\ntarget = "tiny"\n', ""), "--yes", "--prune")
    assert WeightedTarget.objects.count() == 1


def test_an_adapter_may_be_of_a_tenant(run):
    """Also of one that stands behind it in the file. What is shared by weight is of all."""
    own = '\n[[adapters]]\nname = "sql"\nbase = "tiny"\nsource = "acme/sql"\ntenant = "acme"\n'
    run(FLEET.replace("[[tenants]]", own + "\n[[tenants]]", 1), "--yes")
    assert Adapter.objects.get().tenant.name == "acme"
    target = '\n[[weighted_targets]]\nname = "chat"\ntarget = "sql"\n'
    with pytest.raises(CommandError, match=r"sql is an adapter of .* alone; targets are for all tenants"):
        run(FLEET + own + target, "--yes")
