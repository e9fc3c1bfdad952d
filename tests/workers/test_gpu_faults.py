"""Last words of real servers (reports to vLLM and NVIDIA's projects), and who is to blame for each."""

import subprocess

import pytest

from workers.vllm import hardware
from workers.vllm.gpu_faults import Blame, about, address_of, judge

TRACE = "Traceback (most recent call last):\n"
G, S, O = Blame.GPU, Blame.SUSPECT, Blame.OTHER  # noqa: E741


@pytest.mark.parametrize(
    ("log", "blame"),
    [
        # vllm-project/vllm#5222: CUDA's text, as PyTorch raises it, before and since 2.8
        (f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered", G),
        (f"{TRACE}torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", G),
        ("CUDA error (at /pytorch/c10/cuda/CUDAFunctions.cpp): CUDA_ERROR_ECC_UNCORRECTABLE", G),
        # NVIDIA/open-gpu-kernel-modules, NVIDIA/NVSentinel#155: the kernel module, with and without an Xid
        ("NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", G),
        ("               NVRM: fallen off the bus and is not responding to commands.", G),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE)", G),
        ("NVRM: Xid (PCI:0000:3b:00): 95, pid=1971, name=VLLM::EngineCor, Uncontained ECC error", G),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1971, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS", O),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid=1971, Graphics SM Warp Exception: Out Of Range Address", O),
        # NVIDIA/nvidia-docker#1553 and JosephKJ/OWOD#81: nvidia-smi
        ("Unable to determine the device handle for GPU 0000:09:00.0: Unknown Error", G),
        ("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover", G),
        # vllm-project/vllm#27430, #21661: perhaps
        (f"{TRACE}RuntimeError: CUDA error: unspecified launch failure", S),
        (f"{TRACE}torch.AcceleratorError: CUDA error: an illegal memory access was encountered", S),
        (f"{TRACE}RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", S),
        (f"{TRACE}RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", S),
        (f"{TRACE}RuntimeError: No CUDA GPUs are available", S),
        (f"{TRACE}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}", S),
        ("", S),
        # The model, its settings, the build or a neighbour
        (f"{TRACE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", O),
        (
            f"{TRACE}ValueError: Free memory on device cuda:0 (3.11/79.15 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 71.24 GiB).",
            O,
        ),
        (f"{TRACE}RuntimeError: CUDA error: device-side assert triggered", O),
        (f"{TRACE}RuntimeError: CUDA error: no kernel image is available for execution on the device", O),
        (f"{TRACE}RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", O),
        (f"{TRACE}OSError: no-such/model is not a local folder and is not a valid model identifier", O),
        ("vllm serve: error: unrecognized arguments: --no-such-flag", O),
    ],
)
def test_who_is_to_blame(log: str, blame: Blame) -> None:
    assert judge(log, ["3"]).blame == blame


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("(Worker_TP1 pid=803328) ERROR 10-08 17:20:23 [multiproc_executor.py:671] {}", "5"),
        ("(VllmWorker rank=0 pid=499827) ERROR 05-08 06:20:10 [multiproc_executor.py:470] {}", "4"),
        ("[rank1]: {}", "5"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, {}", "7"),
    ],
)
def test_which_of_several(line: str, named: str) -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    verdict = judge(line.format(error), ["4", "5"], {address_of("00000000:3B:00.0"): "7"})
    assert (verdict.blame, verdict.gpus) == (Blame.GPU, (named,))
    assert verdict.words.endswith(error)


def test_one_of_several_that_no_line_names_is_not_guessed() -> None:
    verdict = judge("RuntimeError: CUDA error: uncorrectable ECC error encountered", ["4", "5"])
    assert (verdict.blame, verdict.gpus) == (Blame.SUSPECT, ("4", "5"))


def test_what_a_person_or_the_kernel_killed_accuses_none() -> None:
    assert judge("", ["0"], how="killed (9), perhaps out of memory").blame == Blame.OTHER
    assert judge("", ["0"], how="ended by SIGSEGV (11)").blame == Blame.SUSPECT
    assert judge("RuntimeError: CUDA error", []).blame == Blame.OTHER  # on CPUs


def test_what_the_driver_says_of_other_gpus_is_not_of_this_server() -> None:
    messages = "".join(
        f"NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off the bus.\n" for bus in ("3b", "af", "d8")
    )
    addresses = {"0:3b:00": "0", "0:af:00": "1"}
    assert about(messages, ["1"], addresses).splitlines() == messages.splitlines()[1:2]
    assert about(messages, ["1"], {}) == ""


def test_the_drivers_messages_since_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[   12.5] NVRM: old\n[ 1843.308145] NVRM: Xid (PCI:0000:44:00): 79\n[ 1844.0] usb 1-1: new\n"
    answer = subprocess.CompletedProcess([], 0, stdout=text)
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: answer)
    assert hardware.driver_messages(100.0) == "NVRM: Xid (PCI:0000:44:00): 79\n"
