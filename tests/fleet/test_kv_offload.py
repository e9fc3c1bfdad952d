"""KV in CPU memory as a setting of a deployment."""

import pytest
from django.core.exceptions import ValidationError

from controlplane.fleet.lifecycle.launching import launch_spec, process_spec
from controlplane.fleet.models import Device
from controlplane.planning.scenario import offload_table
from scheduling.fleet.kv_cost import USUAL_RESTORE_S
from workers.vllm.serve import flags

pytestmark = pytest.mark.django_db


def test_a_setting_becomes_a_flag_a_memory_and_a_speed(deployment, make_instance):
    instance, model = make_instance(), deployment.model
    assert instance.offload == (0, 0.0, 0.0)
    assert offload_table(deployment) == {}
    deployment.kv_offload_gib = 40.0
    deployment.save()
    instance.refresh_from_db()
    tokens, token_s = int(40 * 2**30 // model.kv_bytes_per_token), model.kv_bytes_per_token / (2 * 25e9)
    assert instance.offload == (tokens, USUAL_RESTORE_S, pytest.approx(token_s))  # over the links of two A100
    line = flags(process_spec(deployment), 8000)
    assert line[line.index("--kv-offloading-size") + 1] == "40"
    emulated = launch_spec(instance)
    assert emulated.enable_prefix_caching
    assert (emulated.offload_blocks, emulated.restore_s_per_token) == (tokens // 16, pytest.approx(token_s))
    assert offload_table(deployment)["offload_tokens"] == tokens
    instance.launched_with = {"kv_offload_gib": 10.0}  # its server was started with the setting before
    assert instance.offload[0] == int(10 * 2**30 // model.kv_bytes_per_token)


def test_a_deployment_on_cpus_has_none(deployment):
    deployment.gpu_type.device, deployment.kv_offload_gib = Device.CPU, 1.0
    with pytest.raises(ValidationError, match="from GPUs only"):
        deployment.full_clean()
