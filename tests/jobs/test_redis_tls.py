"""A Redis with TLS and a certificate of a private CA: all clients of its address verify it alike, or all refuse."""

import asyncio
import datetime
import ipaddress
import socket
import subprocess
import time

import pytest
import redis
import redis.asyncio as aioredis
from celery import Celery
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from django.core.exceptions import ImproperlyConfigured
from kombu import Connection

from controlplane.env import redis_url
from controlplane.jobs import broker
from tests.redis_server import STARTS_WITHIN_S, program

pytestmark = pytest.mark.services


def certificate(name, key, issuer, issuer_key, *hosts):
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


def write(path, *parts):
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    texts = [
        part.public_bytes(pem)
        if isinstance(part, x509.Certificate)
        else part.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
        for part in parts
    ]
    path.write_bytes(b"".join(texts))
    return str(path)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Server:
    def __init__(self, tls, plain, ca):
        self.tls, self.plain, self.ca = tls, plain, ca


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """On 127.0.0.1, for which its certificate is, and not for `localhost`; with another port without TLS."""
    folder = tmp_path_factory.mktemp("a ca")  # with a space
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certificate("A private CA", ca_key, None, ca_key)
    own = certificate("redis", key, ca.subject, ca_key, x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    ca_file = write(folder / "ca.pem", ca)
    tls, plain = free_port(), free_port()
    command = [program(), "--port", str(plain), "--tls-port", str(tls), "--save", "", "--requirepass", "pw"]
    command += ["--tls-cert-file", write(folder / "own.pem", own), "--tls-key-file", write(folder / "key.pem", key)]
    command += ["--tls-ca-cert-file", ca_file, "--tls-auth-clients", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        end_s = time.monotonic() + STARTS_WITHIN_S
        while broker.redis_problem(f"redis://:pw@127.0.0.1:{plain}/0"):
            assert time.monotonic() < end_s
            assert process.poll() is None, "this Redis has no TLS"
            time.sleep(0.05)
        yield Server(tls, plain, ca_file)
        process.terminate()


def by_commands(url):
    with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
        client.ping()


def by_the_gateway(url):
    async def ping():
        async with aioredis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
            await client.ping()

    asyncio.run(ping())


def by_celery(url):
    app = Celery("test", broker=url)
    with app.connection_for_write(transport_options={"socket_timeout": 3, "socket_connect_timeout": 3}) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        connection.default_channel.client.ping()


def by_kombu(url):
    with Connection(url, transport_options={"socket_timeout": 3}) as connection:
        connection.default_channel.client.ping()


CLIENTS = (by_commands, by_the_gateway, by_celery, by_kombu)


@pytest.mark.parametrize(
    ("address", "knows_ca", "problem"),
    [
        ("rediss://:pw@127.0.0.1:{tls}/0", True, ""),
        ("rediss://:pw@127.0.0.1:{tls}/0", False, "set REDIS_CA_FILE"),
        ("rediss://:pw@localhost:{tls}/0", True, "of another host"),
        ("redis://:pw@127.0.0.1:{tls}/0", True, "use rediss://"),
        ("rediss://:pw@127.0.0.1:{plain}/0", True, "use redis://"),
        ("rediss://:pw@localhost:{tls}/0?ssl_cert_reqs=none", False, ""),  # as somebody wrote
    ],
)
def test_all_verify_it_alike_or_all_refuse(server, settings, address, knows_ca, problem):
    url = redis_url(address.format(tls=server.tls, plain=server.plain), server.ca if knows_ca else "")
    refused = {}
    for client in CLIENTS:
        try:
            client(url)
        except Exception as error:
            refused[client.__name__] = error
    assert len(refused) in (0, len(CLIENTS)), refused
    assert bool(refused) is bool(problem), refused
    said = broker.redis_problem(url)
    assert problem in said
    assert bool(said) is bool(problem)
    settings.REDIS_URL = url
    assert [problem in warning.msg for warning in broker.check_redis()] == ([True] if problem else [])


def test_a_ca_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ImproperlyConfigured, match="REDIS_CA_FILE"):
        redis_url("rediss://h:1/0", str(tmp_path / "x.pem"))
    assert redis_url("redis://h:1/0", str(tmp_path / "x.pem")) == "redis://h:1/0"
