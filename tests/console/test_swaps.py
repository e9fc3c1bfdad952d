"""Shared GPUs on the instances page, on an instance's page, in `/api` and in the deploy form."""

import pytest

from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, Swap, SwapGroup
from tests.console.test_rollouts import html_of

pytestmark = pytest.mark.django_db
S = InstanceState


@pytest.fixture
def shared(deployment, make_instance, node):
    group = SwapGroup.objects.create(name="us-east-1")
    model = Model.objects.create(
        name="other", title="Other", source="/models/other", weights_bytes=50 * 10**9, kv_bytes_per_token=131_072,
        context_tokens=8_192,
    )  # fmt: skip
    of = Deployment.objects.create(
        model=model, region=deployment.region, gpu_type=deployment.gpu_type, tensor_parallel=2
    )
    first = make_instance(name="first", node=node, swap_group=group)
    return first, make_instance(name="second", deployment=of, node=node, state=S.SLEEPING, swap_group=group)


def post(client, path, **body):
    return client.post(f"/api{path}", body, content_type="application/json")


def test_nothing_is_said_where_no_gpus_are_shared(client, operator, make_instance):
    row = make_instance()
    client.force_login(operator)
    assert "Shared GPUs" not in html_of(client, "fleet")
    assert "Shares its GPUs" not in html_of(client, "instance", row.name)


def test_members_of_a_group_their_state_and_the_duration_of_a_swap(acting, shared):
    page = html_of(acting, "fleet")
    assert "<strong>first</strong> is awake" in page
    assert "No swap yet." in page
    # 16.06 GB over two GPUs to memory, 50 GB back
    assert '1.3 s <span class="muted">by size</span>' in page
    assert "first finishes what it runs and is given nothing new, then sleeps (0.3 s, by size)" in page
    assert page.count("Swap to…") == 1
    assert "first is awake. Its weights: CPU memory" in html_of(acting, "instance", "second")


def test_the_same_by_rest(acting, shared):
    assert acting.get("/api/instances/second").json()["swap_group"] == "us-east-1"
    answer = post(acting, "/instances/second/swap", reason="more asked for")
    assert (answer.status_code, answer.json()) == (200, {"message": "us-east-1 swaps to second, when first is idle."})
    assert post(acting, "/instances/first/swap", reason="back").status_code == 409
    swap = Swap.objects.get()
    assert (swap.instance.name, swap.state, swap.gave_way.name) == ("second", "in_progress", "first")


def test_a_model_is_deployed_on_the_gpus_of_another(client, operator, make_instance, node):
    make_instance(name="first", node=node)
    client.force_login(operator)
    wanted = {
        "region": "us-east", "gpu_type": "a100-80gb", "model": "mistral-7b", "source": "/models/mistral", "weights_gb": 14.5,
        "kv_kib_per_token": 128, "context_tokens": 8192, "tensor_parallel": 2, "share_gpus_with": "first",
        "launcher": "process",
    }  # fmt: skip
    answer = post(client, "/deploy", **wanted)
    assert answer.status_code == 201, answer.json()
    row = Instance.objects.get(name=answer.json()["instances"][0])
    assert (row.state, row.node, row.swap_group.name) == (S.STOPPED, node, "us-east-1")
    assert Instance.objects.get(name="first").swap_group == row.swap_group
    assert node.free_gpus() == 6
    answer = post(client, "/deploy", **wanted | {"model": "qwen-7b", "tensor_parallel": 1})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "share_gpus_with")
    assert "2 x A100 80 GB" in answer.json()["error"]["message"]
    answer = post(client, "/deploy", **wanted | {"model": "qwen-7b", "share_gpus_with": "nobody"})
    assert "There is no instance" in answer.json()["error"]["message"]
    assert '<option value="first">first</option>' in html_of(client, "deploy")
