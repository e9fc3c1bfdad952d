"""Pulls a repository of the hub onto this machine's disk: `python pull.py SOURCE BASE ORDER`, with the Python of vLLM.

It returns at once; a process of its own does the work, holds the lock `BASE.lock` as long as it lives, and leaves its last
error in `BASE.error`. The lock says which order it carries out. Where one pulls already, nothing is done.
"""

import fcntl
import os
import sys
from pathlib import Path

NOT_LOADED = ["original/*", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Weights in forms that vLLM does not load by itself."""


def main(source: str, base: str, order: str) -> None:
    error = Path(f"{base}.error")
    with open(f"{base}.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        error.unlink(missing_ok=True)
        lock.truncate(0)
        lock.write(order)
        lock.flush()
        if os.fork():  # the lock goes on with the child
            os._exit(0)
        os.setsid()
        try:
            from huggingface_hub import snapshot_download

            snapshot_download(source, ignore_patterns=NOT_LOADED)
        except BaseException as reason:
            error.write_text(f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:400])
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
