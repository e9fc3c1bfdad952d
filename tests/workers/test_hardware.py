"""GPUs as nvidia-smi lists them, and what processes take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.vllm import hardware
from workers.vllm.describe_node import tables, type_name
from workers.vllm.hardware import Gpu, HardwareError, Machine, parse_gpus, parse_processes

# The formats of nvidia-smi 535 to 580 for `--format=csv,noheader,nounits`.
LISTED = """\
0, NVIDIA H100 80GB HBM3, 81559, GPU-1b0a7c3e-0d5f-4c6e-9f2a-1d2c3b4a5968
1, NVIDIA H100 80GB HBM3, 81559, GPU-2c1b8d4f-1e60-4d7f-a03b-2e3d4c5b6a79
2, NVIDIA A100-SXM4-80GB, 81920, GPU-3d2c9e50-2f71-4e80-b14c-3f4e5d6c7b8a
"""
USED = "4242, 71230\n4243, 512\n4242, 100\n4244, [N/A]\n"


def test_gpus_with_index_name_and_memory() -> None:
    gpus = parse_gpus(LISTED)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].memory_bytes == 81559 * 2**20
    assert gpus[2].name == "NVIDIA A100-SXM4-80GB"
    assert gpus[1].uuid.startswith("GPU-2c1b")
    assert parse_gpus("No devices were found\n") == ()


def test_a_gpu_off_the_bus_is_an_error_that_names_it() -> None:
    with pytest.raises(HardwareError, match=r"GPU 3 \(NVIDIA L4\): memory \[N/A\]"):
        parse_gpus("3, NVIDIA L4, [N/A], GPU-x\n")


def test_memory_of_processes() -> None:
    assert parse_processes(USED) == {4242: 71330 * 2**20, 4243: 512 * 2**20}


@pytest.mark.parametrize(
    ("name", "memory_mib", "short"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb"),
        ("NVIDIA L40S", 46068, "l40s-48gb"),
        ("Tesla T4", 15360, "t4-15gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-24gb"),
    ],
)
def test_names_of_types(name: str, memory_mib: int, short: str) -> None:
    assert type_name(Gpu(0, name, memory_mib * 2**20, "u")) == short


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that is first on PATH."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase \"$1\" in *gpu=*) printf '{LISTED}';; *) printf '{USED}';; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_this_machine_is_asked(nvidia_smi: Path) -> None:
    assert len(hardware.machine().gpus) == 3
    assert hardware.gpu_memory_of({4242: 0, 1: 0}) == 71330 * 2**20
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    with pytest.raises(HardwareError, match="Driver/library version mismatch"):
        hardware.machine()
    assert hardware.gpu_memory_of({4242: 0}) is None


def test_a_machine_without_gpus_computes_on_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = hardware.machine()
    assert machine.gpus == ()
    assert machine.memory_bytes > 2**28
    assert hardware.gpu_memory_of({1: 0}) is None


def test_processes_of_a_session_and_their_memory() -> None:
    # Memory that is one process's alone: PSS divides the interpreter's own pages among all that run.
    holds = "held = b'x' * (4 << 20)"
    inner = f"import os; {holds}; print(os.getpid(), flush=True); input()"
    child = f"import subprocess as s, sys; {holds}; s.Popen([sys.executable, '-c', {inner!r}]).wait()"
    leader = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    other = int(leader.stdout.readline())
    memory = hardware.processes_of(leader.pid)
    assert set(memory) == {leader.pid, other}
    assert all(size > 4 << 20 for size in memory.values())
    assert hardware.command_line_of(leader.pid)[1:] == ["-c", child]
    leader.communicate("\n")
    assert hardware.processes_of(leader.pid) == {}
    assert hardware.command_line_of(leader.pid) == []


@pytest.mark.django_db
@pytest.mark.parametrize("listed", [LISTED, ""])
def test_the_tables_can_be_applied(listed: str, tmp_path: Path) -> None:
    from controlplane.fleet.inventory.fleet_file import apply, read
    from controlplane.fleet.models import Device, Node

    machine = Machine(parse_gpus(listed), memory_bytes=32 * 2**30)
    path = tmp_path / "FLEET.toml"
    path.write_text(
        '[[regions]]\nname = "here"\ntitle = "Here"\n\n' + tables(machine, region="here", node="n", address="::1")
    )
    apply(read(path), "test")
    nodes = {node.name: (node.gpu_type.name, node.gpu_type.device, node.gpu_count) for node in Node.objects.all()}
    if listed:
        assert nodes == {"n-h100-80gb": ("h100-80gb", Device.GPU, 2), "n-a100-80gb": ("a100-80gb", Device.GPU, 1)}
    else:
        assert nodes == {"n": ("cpu", Device.CPU, 1)}
