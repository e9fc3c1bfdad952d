"""The tabs of the pages of batches, each with its count."""

from django.urls import reverse
from msgspec import Struct

from controlplane.batches.models import ENDED, Batch
from controlplane.console.formats import amount
from controlplane.console.live import held_work
from controlplane.console.live.state import LiveState
from controlplane.fleet.spot.selectors import open_donations


class Section(Struct, frozen=True):
    """A tab; *number* is None while it is not known."""

    page: str
    title: str
    number: int | None = None
    word: str = ""

    @property
    def address(self) -> str:
        return reverse(f"console:{self.page}")


def sections(state: LiveState) -> list[Section]:
    """Return the tabs in order: batches that run, requests held now, instances donated."""
    held = held_work.totals(state.tables)["held"] if state.known else None
    return [
        Section("batches", "Batches", Batch.objects.exclude(status__in=ENDED).count(), "running"),
        Section("held-work", "Held work", held, "requests"),
        Section("spot", "Spot pool", open_donations().count(), "donated"),
    ]


def html(state: LiveState) -> dict[str, str]:
    """Return the counts as fragments."""
    return {f"sections/{one.page}": amount(one.number) for one in sections(state) if one.number is not None}
