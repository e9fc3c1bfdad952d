"""Files of batches in a real S3-compatible server (moto's), by `PILOTHOUSE_FILES_URL`."""

import urllib.request

import openai
import pytest

from controlplane import env
from controlplane.batches.models import StoredFile
from tests.batches.test_api import client, ended, gateway_options, here, input_of, lines_of, run, upload

__all__ = ["client", "gateway_options", "here"]
pytestmark = pytest.mark.services


@pytest.fixture
def server(monkeypatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = f"http://{host}:{port}"
    yield url
    refuse_after(url, "inf")
    server.stop()


def refuse_after(server, calls):
    """Let *server* take its keys for wrong after so many *calls*."""
    request = urllib.request.Request(f"{server}/moto-api/reset-auth", calls.encode(), {"Content-Type": "text/plain"})
    urllib.request.urlopen(request).close()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """A bucket in which files lie; they are put there by the storage that the variable names."""
    from storages.backends.s3 import S3Storage

    url = f"s3://files/pilothouse?endpoint_url={server}&region_name=us-east-1"
    storage = S3Storage(**env.file_storage(url, tmp_path)["OPTIONS"])
    monkeypatch.setattr(StoredFile._meta.get_field("content"), "storage", storage)
    storage.connection.create_bucket(Bucket="files")
    return storage.connection.Bucket("files")


def keys_of(bucket):
    return {item.key for item in bucket.objects.all()}


async def test_a_batch_reads_and_writes_its_files_there(bucket, served, client):
    content = input_of(25)
    batch = await ended(client, await run(client, content))
    assert batch.status == "completed"
    answers = await lines_of(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{number}" for number in range(25))
    assert keys_of(bucket) == {f"pilothouse/{name}.jsonl" for name in (batch.input_file_id, batch.output_file_id)}
    assert (await client.files.content(batch.input_file_id)).content == content
    await client.files.delete(batch.input_file_id)
    assert keys_of(bucket) == {f"pilothouse/{batch.output_file_id}.jsonl"}


async def test_a_large_file_comes_back_whole(bucket, served, client):
    content = input_of(60_000)
    assert len(content) > 8 * 2**20
    file = await upload(client, content)
    assert (await client.files.content(file.id)).content == content


async def test_a_store_that_refuses_is_said_and_loses_nothing(server, bucket, served, client, caplog):
    file = await upload(client, input_of(2))
    refuse_after(server, "0")
    for attempt in (
        upload(client, input_of(2)),
        client.files.content(file.id),
        client.files.delete(file.id),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await attempt
        assert (refused.value.status_code, refused.value.code) == (503, "file_store_unavailable")
        assert server not in refused.value.message
    assert "PILOTHOUSE_FILES_URL" in caplog.text
    assert "InvalidAccessKeyId" in caplog.text
    assert (await client.files.retrieve(file.id)).id == file.id


async def test_a_file_that_is_gone_is_not_found(bucket, served, client):
    file = await upload(client, input_of(1))
    bucket.objects.all().delete()
    with pytest.raises(openai.NotFoundError, match="gone"):
        await client.files.content(file.id)
