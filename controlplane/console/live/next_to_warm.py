"""What prewarming starts next, as the Applications page shows it."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from controlplane.console.live.state import LiveState

KINDS: Final = {
    "adapter": "LoRA adapter",
    "prefix": "system prompt",
    "model": "sleeping model",
    "container": "container",
    "dnn": "DNN model",
}
SHOWN: Final = 6


def panel(
    state: LiveState,
    titles: Mapping[str, str],
    *,
    tenants: Collection[int] | None = None,
    region: str = "",
    places: bool = True,
) -> dict[str, Any]:
    """Return the context of `console/applications/next_to_warm.html`: what starts first, of *tenants* and a *region* alone
    where they are given. *titles* are those of regions, by name; *places*: whether regions are shown.
    """
    rows = [
        {**row, "word": KINDS.get(row["kind"], row["kind"]), "where": _where(row, titles) if places else row["model"]}
        for row in state.tables["next_to_warm"]
        if (tenants is None or row["tenant_id"] in tenants) and region in ("", row["region"])
    ]
    return {"next_to_warm": rows[:SHOWN], "more_to_warm": max(0, len(rows) - SHOWN), "warming_known": state.known}


def _where(row: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (row["model"], titles.get(row["region"], row["region"]))))
