"""Budgets of batches (lines that wait, and dollars); the order in which their files are worked on, and full disks."""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, storages
from django.db import OperationalError

from controlplane.accounts.models import Budget, Tenant
from controlplane.batches import services
from controlplane.batches.budgets import CODE, spent_budgets, waiting_lines, with_waiting_lines
from controlplane.batches.feeder import grant_of
from controlplane.batches.models import Batch, BatchLine, BatchStatus, StoredFile
from controlplane.gateway.errors import ApiError
from workers.tasks import batches as tasks
from workers.tasks.planning import only_one

pytestmark = pytest.mark.django_db


def batch_of(key, lines, validated=True):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    text = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
        for n in range(lines)
    )
    file = services.create_file(key.tenant, ContentFile(text.encode(), "in.jsonl"), "in.jsonl", "batch")
    batch = services.create_batch(key, file, "/v1/chat/completions", "24h")
    if validated:
        services.validate_batch(batch.pk)
        batch.refresh_from_db()
    return batch


def test_a_batch_beyond_the_lines_that_may_wait_fails_and_the_next_is_refused(key):
    budget = Budget.objects.create(tenant=key.tenant, kind="batch_lines", hard=10)
    assert batch_of(key, 6).status == BatchStatus.IN_PROGRESS
    failed = batch_of(key, 5)
    assert (failed.status, failed.errors[0]["code"]) == (BatchStatus.FAILED, CODE)
    assert waiting_lines(budget) == 6
    assert batch_of(key, 4).status == BatchStatus.IN_PROGRESS
    with pytest.raises(ApiError) as refused:
        batch_of(key, 1)
    assert (refused.value.status, refused.value.code) == (429, CODE)
    Batch.objects.update(completed=3)
    assert waiting_lines(budget) == 4
    counts = [({}, 4), ({"tenant": key.tenant, "api_key": key}, 4), ({"model": "m"}, 4), ({"model": "n"}, 0)]
    for scope, count in counts:
        row = Budget.objects.create(kind="batch_lines", hard=99, **scope)
        assert waiting_lines(row) == with_waiting_lines(Budget.objects.all()).get(pk=row.pk).waiting == count, scope
    assert batch_of(key, 6).status == BatchStatus.IN_PROGRESS


@pytest.mark.parametrize(("scope", "counts"), [({"model": "m"}, True), ({"model": "n"}, False)])
def test_lines_count_towards_the_budget_of_their_model(key, scope, counts):
    Budget.objects.create(kind="batch_lines", hard=2, **scope)
    assert (batch_of(key, 3).status == BatchStatus.FAILED) is counts


def test_a_spent_budget_says_that_lines_wait(key):
    Budget.objects.create(tenant=key.tenant, kind="usd_per_month", hard=400, stopped_at=key.created_at)
    assert spent_budgets(Tenant.objects.all()) == ["acme's budget of $400 is spent; lines wait"]


def test_lines_ask_for_the_models_that_their_key_may(key):
    key.allowed_models = ["n"]
    key.save()
    failed = batch_of(key, 1)
    assert (failed.status, failed.errors[0]["code"]) == (BatchStatus.FAILED, "model_not_found")
    key.allowed_models = ["m"]
    key.save()
    batch = batch_of(key, 1)
    assert batch.status == BatchStatus.IN_PROGRESS
    assert grant_of(batch).models == {"m"}


def test_the_files_of_one_batch_are_worked_on_at_a_time_and_the_next_comes_then(key, settings, tmp_path, monkeypatch):
    settings.STATE_DIR, sent = tmp_path, []
    monkeypatch.setattr(tasks.validate, "delay", sent.append)
    first, _, second = (batch_of(key, lines, validated=False) for lines in (1, 3, 1))
    with only_one("batch-files"):
        assert not tasks.validate(first.pk)
    assert tasks.validate(first.pk)
    assert sent == [second.pk]
    assert tasks.validate(second.pk)
    assert len(sent) == 2, "the smallest file comes first"


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("ours"), "failed"), (OperationalError("away"), "validating")]
)
def test_a_batch_whose_validation_raises_fails_unless_the_database_is_away(key, monkeypatch, error, status):
    batch = batch_of(key, 1, validated=False)
    monkeypatch.setattr(services, "check_lines", Mock(side_effect=error))
    with nullcontext() if status == "failed" else pytest.raises(OperationalError):
        assert services.validate_batch(batch.pk) is False
    batch.refresh_from_db()
    assert batch.status == status
    assert [each["code"] for each in batch.errors] == ["internal_error"] * (status == "failed")


def test_a_full_disk_leaves_no_part_of_a_file_behind(key, monkeypatch):
    batch = batch_of(key, 2)
    for line, succeeded in zip(BatchLine.objects.order_by("number"), (True, False), strict=True):
        services.record_answers([services.Answer(line.pk, batch.pk, "{}", succeeded)])
    services.enter(batch.pk, BatchStatus.FINALIZING, of=(BatchStatus.IN_PROGRESS,), ends_as=BatchStatus.COMPLETED)
    Batch.objects.update(total=0)  # as of one that was cancelled before all lines were read
    save, room, store = FileSystemStorage._save, [1], storages["files"]
    others = set(store.listdir("")[1]) - set(StoredFile.objects.values_list("content", flat=True))

    def full(storage, name, content):
        if not room:
            Path(storage.path(name)).write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        room.pop()
        return save(storage, name, content)

    monkeypatch.setattr(FileSystemStorage, "_save", full)
    with pytest.raises(ApiError, match="Nothing was lost"):
        services.finish_batch(batch.pk)
    room += [1, 1]
    assert services.finish_batch(batch.pk)
    kept = StoredFile.objects.values_list("filename", flat=True)
    assert sorted(kept) == sorted(["in.jsonl", f"{batch.public_id}_errors.jsonl", f"{batch.public_id}_output.jsonl"])
    batch.refresh_from_db()
    assert batch.total == 2
    assert set(store.listdir("")[1]) - others == set(StoredFile.objects.values_list("content", flat=True))
