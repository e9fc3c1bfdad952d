"""A Redis with TLS and a certificate of a private CA: all clients of its address verify it alike, or all refuse."""

import asyncio

import pytest
import redis
import redis.asyncio as aioredis
from celery import Celery
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.core.exceptions import ImproperlyConfigured
from kombu import Connection

from controlplane.env import redis_url
from controlplane.jobs import broker
from controlplane.supervisor.redis_server import answers
from tests.redis_server import redis_with_tls

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_with_tls(tmp_path_factory.mktemp("a ca")) as server:  # with a space
        yield server


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


def by_channels(url):
    async def tell():
        layer = RedisPubSubChannelLayer(hosts=[url])
        async with asyncio.timeout(3):
            await layer.group_add("browsers", channel := await layer.new_channel())
            await layer.group_send("browsers", {"type": "shown"})
            assert await layer.receive(channel) == {"type": "shown"}
            await layer.flush()

    asyncio.run(tell())


def by_the_supervisor(url):
    assert asyncio.run(answers(url))


CLIENTS = (by_commands, by_the_gateway, by_celery, by_kombu, by_channels, by_the_supervisor)


@pytest.mark.parametrize(
    ("address", "knows_ca", "problem"),
    [
        ("rediss://:pw@127.0.0.1:{tls}/0", True, ""),
        ("rediss://:pw@127.0.0.1:{tls}/0", False, "add ?ssl_ca_certs="),
        ("rediss://:pw@localhost:{tls}/0", True, "of another host"),
        ("redis://:pw@127.0.0.1:{tls}/0", False, "use rediss://"),
        ("rediss://:pw@127.0.0.1:{plain}/0", True, "use redis://"),
        ("rediss://:pw@localhost:{tls}/0?ssl_cert_reqs=none", False, ""),  # as somebody wrote
    ],
)
def test_all_verify_it_alike_or_all_refuse(server, settings, address, knows_ca, problem):
    url = redis_url(
        address.format(tls=server.tls, plain=server.plain) + (f"?ssl_ca_certs={server.ca}" if knows_ca else "")
    )
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
    with pytest.raises(ImproperlyConfigured, match="REDIS_URL: there is no file"):
        redis_url(f"rediss://h:1/0?ssl_ca_certs={tmp_path}/x.pem")
