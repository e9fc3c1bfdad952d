"""Names and titles that filters and tables offer: models, regions, GPU types."""

from controlplane.fleet.models import GpuType, Model, Region


def model_names() -> list[str]:
    return list(Model.objects.filter(active=True).values_list("name", flat=True))


def region_names() -> list[tuple[str, str]]:
    return list(Region.objects.filter(active=True).values_list("name", "title"))


def place_titles() -> dict[str, str]:
    """Return titles of regions and GPU types by name, inactive ones included: past plans and moves refer to them."""
    return {**dict(Region.objects.values_list("name", "title")), **dict(GpuType.objects.values_list("name", "title"))}
