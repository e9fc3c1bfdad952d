"""The committed OpenAPI document is the one that the code makes."""

import json

from django.core.management import call_command

from controlplane.api.management.commands.openapi import DOCUMENT, document


def test_the_committed_document_is_up_to_date():
    assert DOCUMENT.read_text() == document(), "run `manage.py openapi --write` and look at what changed"


def test_every_operation_is_named_described_by_tag_and_answers_errors_alike():
    schema = json.loads(document())
    names = []
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            names.append(operation["operationId"])
            assert operation["tags"], path
            assert operation["security"], path
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith(
                "ErrorBody"
            )
    assert len(names) == len(set(names))


def test_the_command_prints_it(capsys):
    call_command("openapi")
    assert json.loads(capsys.readouterr().out)["info"]["title"] == "Pilothouse"
