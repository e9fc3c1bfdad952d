"""Ray without Ray: which machines an instance gets, and what is said where the cluster cannot be asked."""

import socket
import sys
from typing import Any

import pytest

from workers.ray import launcher
from workers.ray.launcher import Machine, connect, spread, unreachable
from workers.vllm.launcher import LaunchError
from workers.vllm.serve import flags
from workers.vllm.spec import LaunchSpec


@pytest.mark.parametrize(
    ("gpus", "free", "machines"),
    [
        (1, {"a": 4, "b": 2}, ["b"]),  # the fullest that fits
        (4, {"a": 4, "b": 2}, ["a"]),
        (2, {"a": 1, "b": 2}, ["b"]),  # on one machine where it can
        (4, {"a": 2, "b": 2, "c": 3}, ["a", "b"]),
        (6, {"a": 2, "b": 2, "c": 3}, ["a", "b", "c"]),
        (8, {"a": 2, "b": 2, "c": 3}, []),
        (3, {"a": 2, "b": 2}, []),  # equal shares alone
        (1, {}, []),
        (1, {"a": 0}, []),
    ],
)
def test_an_instance_has_equal_shares_of_the_fewest_machines(
    gpus: int, free: dict[str, int], machines: list[str]
) -> None:
    assert spread(gpus, free) == machines


def test_a_process_on_each_machine_is_told_of_the_others() -> None:
    assert launcher._over_machines(1, 0, "10.0.0.1", 5000) == []
    first, second = (launcher._over_machines(2, rank, "10.0.0.1", 5000) for rank in (0, 1))
    assert ("--headless" in first, "--headless" in second) == (False, True)
    ranks = [words[words.index("--node-rank") + 1] for words in (first, second)]
    assert ranks == ["0", "1"]
    common = "--pipeline-parallel-size 2 --distributed-executor-backend mp --nnodes 2"
    assert " ".join(first).startswith(common)
    spec = LaunchSpec(name="a", model="m", source="s", tensor_parallel=4, host="10.0.0.1")
    assert "--tensor-parallel-size 4" in " ".join(flags(spec, 8000))


def node(**changes: Any) -> dict[str, Any]:
    """A machine as `ray.nodes()` has it."""
    described = {"NodeID": "x", "Alive": True, "NodeName": "10.0.0.7", "NodeManagerAddress": "10.0.0.7"}
    resources = {"GPU": 8.0, "region:us-east": 1.0, "gpu:h100-80gb": 1.0}
    return {**described, "NodeManagerHostname": "gpu-7.local", "Resources": resources, "Labels": {}, **changes}


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, ("gpu-7-local", "us-east", "h100-80gb", "GPU", 8)),  # a name and no address, without dots
        ({"NodeName": "rack-1"}, ("rack-1", "us-east", "h100-80gb", "GPU", 8)),
        ({"Resources": {"GPU": 4.0, "group:pair": 1.0}}, ("pair", "", "", "GPU", 4)),
        ({"Resources": {"gpu:cpu": 2.0, "region:a": 1.0}}, ("gpu-7-local", "a", "cpu", "gpu:cpu", 2)),
        ({"Resources": {"CPU": 2.0}}, ("gpu-7-local", "", "", "GPU", 0)),
        (
            {"Resources": {"GPU": 1.0}, "Labels": {"ray.io/region": "us", "ray.io/accelerator-type": "H100"}},
            ("gpu-7-local", "us", "H100", "GPU", 1),
        ),
        ({"Resources": {"GPU": 1.0, "accelerator_type:A100": 1.0}}, ("gpu-7-local", "", "A100", "GPU", 1)),
    ],
)
def test_what_a_machine_is_called_and_has(changes: dict[str, Any], facts: tuple[Any, ...]) -> None:
    machine = launcher._machine(node(**changes), {"some": 1})
    assert (machine.node, machine.region, machine.gpu_type, machine.resource, machine.gpus) == facts
    assert machine.free == machine.gpus - 1
    assert isinstance(machine, Machine)


def test_why_a_cluster_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert unreachable(address) == ""
    assert unreachable(address) == f"Ray's head at {address} does not answer (Connection refused)"
    for bad in ("", "auto", "10.0.0.1"):
        assert unreachable(bad).startswith(f"RAY_ADDRESS is {bad!r}, and not HOST:PORT")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match="Ray is not installed on this host: pip install"):
        connect(address)
