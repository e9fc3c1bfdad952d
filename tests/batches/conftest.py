import pytest

from controlplane.accounts.models import ApiKey
from tests.gateway.conftest import gateway_options, served
from tests.gateway.rows import make_rows

__all__ = ["gateway_options", "served"]


@pytest.fixture
def key(db):
    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)
    return ApiKey.objects.select_related("tenant").get()
