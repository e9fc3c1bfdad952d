"""Process that requests `/healthz` ten times a second, on a new connection each time, until its input closes.

`python -m tests.bench._watch PORT PID` prints one JSON object: times in milliseconds, and the resident memory of PID in
MB.
"""

import http.client
import json
import select
import sys
import time
from pathlib import Path


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main(port: int, pid: int) -> None:
    health_ms, memory_mb = [], []
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        asked_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/healthz")
        if connection.getresponse().status != 200:
            raise SystemExit("/healthz did not answer 200")
        connection.close()
        health_ms.append((time.perf_counter() - asked_s) * 1000)
        memory_mb.append(rss_mb(pid))
    print(json.dumps({"health_ms": health_ms, "memory_mb": memory_mb}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
