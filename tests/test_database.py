"""The test database is what migrations make, and what cleaning leaves behind is what Django's own leaves."""

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection, transaction

from controlplane.fleet.models import Region
from tests import database

NAMED = ("content_type__app_label", "content_type__model", "codename", "name")


def contents() -> dict[str, list]:
    return {
        "types": sorted(ContentType.objects.values_list("app_label", "model")),
        "permissions": sorted(Permission.objects.values_list(*NAMED)),
        "regions": list(Region.objects.all()),
    }


@pytest.mark.django_db(transaction=True)
def test_cleaning_leaves_what_django_s_own_leaves():
    call_command("flush", verbosity=0, interactive=False)
    wanted = contents()
    assert wanted["permissions"]
    assert wanted["types"]
    database.empty("default")
    Region.objects.create(name="us-east", title="US East")
    database.empty("default")
    assert contents() == wanted
    Permission.objects.all().delete()
    database.empty("default")
    assert contents() == wanted, "what a test deletes is made anew"


@pytest.mark.django_db
def test_the_database_is_what_migrations_make():
    call_command("migrate", check_unapplied=True, verbosity=0)  # exits where one is missing
    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)
    if connection.vendor == "sqlite":
        assert database.migrated().is_file()


def test_another_migration_or_permission_makes_another_database(monkeypatch):
    before = database.migrated()
    monkeypatch.setattr(Region._meta, "permissions", [("rename", "Can rename it")])
    assert database.migrated() != before


@pytest.mark.django_db
def test_rows_written_once_are_there_again_unchanged():
    calls = []

    def build():
        calls.append(Region.objects.create(name="us-east", title="US East").pk)

    for _ in range(3):
        with transaction.atomic():
            database.write(build)
            assert list(Region.objects.values_list("name", "title", "active")) == [("us-east", "US East", True)]
            transaction.set_rollback(True)
    assert len(calls) == (1 if connection.vendor == "sqlite" else 3)
    Region.objects.create(name="eu-west", title="EU West")
    with transaction.atomic():
        database.write(build)
        assert Region.objects.count() == 2, "it is called again where another row is there before"
