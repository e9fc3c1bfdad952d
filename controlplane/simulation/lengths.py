"""Output lengths as a version of the length model predicts them, replacing a simulation's own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from controlplane.lengths.models import BUNDLED, LengthVersion
from forecasting.lengths import TEXTLESS, LengthQuery
from forecasting.lengths.subprocess_server import load
from scheduling.simulation.staging import Stage

BATCH: Final = 1024


def read_texts(path: Path) -> list[str]:
    """Return the prompts of a trace, one a line, in its order. Raise ValueError for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def predicted_by(number: int, staged: Stage, texts: Sequence[str] | None = None) -> Stage:
    """Return *staged* with lengths predicted by version *number* (0: the bundled trees).

    Without *texts*, one a request, the trees and kinds that read none answer by sizes and names. Raises ValueError for
    an unknown version, an unusable file, missing prompts, or a wrong number of them.
    """
    version = _version(number)
    requests = staged.requests
    if texts is None and version.kind not in TEXTLESS:
        raise ValueError(
            f"{version} reads prompts, and the trace has none: give them, one a line, or take a version of"
            f" {', '.join(sorted(TEXTLESS))}."
        )
    if texts is not None and len(texts) != requests.count:
        raise ValueError(f"There are {len(texts):,} prompts for {requests.count:,} requests.")
    try:
        model = load(version.kind, version.path)
    except (OSError, KeyError) as error:
        raise ValueError(f"{version} cannot be read: {error}") from error
    tokens = np.empty(requests.count)
    for start in range(0, requests.count, BATCH):
        stop = min(start + BATCH, requests.count)
        queries = [_query(staged, at, texts[at] if texts else "") for at in range(start, stop)]
        tokens[start:stop] = model.predict(queries).tokens
    predicted = np.maximum(1, np.rint(tokens)).astype(np.int32)
    return replace(staged, requests=requests._replace(predicted_tokens=predicted))


def _version(number: int) -> LengthVersion:
    if number == BUNDLED.number:
        return BUNDLED
    row = LengthVersion.objects.filter(number=number).first()
    if row is None:
        raise ValueError(f"There is no version {number} of the length model.")
    return row


def _query(staged: Stage, at: int, text: str) -> LengthQuery:
    requests, names = staged.requests, staged.names
    return LengthQuery(
        text,
        int(requests.prompt_tokens[at]),
        names.models[requests.model[at]],
        names.tenants[requests.tenant[at]],
        names.slo_classes[requests.slo_class[at]],
    )
