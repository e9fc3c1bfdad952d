import pytest

from tests.inventory import *  # noqa: F403 (fixtures)


@pytest.fixture(autouse=True)
def _no_rule_but_the_tests(request):
    """Built-in rules, which migrations add, are in the way of those that a test makes."""
    marked = request.node.get_closest_marker("django_db")
    if marked:
        from controlplane.alerts.models import AlertRule

        request.getfixturevalue("transactional_db" if marked.kwargs.get("transaction") else "db")
        AlertRule.objects.all().delete()
