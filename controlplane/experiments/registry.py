"""All experiments, by name."""

from typing import Final

from controlplane.experiments.bursts import BURSTS
from controlplane.experiments.experiment import Experiment
from controlplane.experiments.hermes import HERMES
from controlplane.experiments.hermes_prewarming import HERMES_PREWARMING
from controlplane.experiments.length_models import LENGTH_MODELS
from controlplane.experiments.preserve_routing import PRESERVE_ROUTING
from controlplane.experiments.preserve_scaling import PRESERVE_SCALING
from controlplane.experiments.promises import PROMISES
from controlplane.experiments.qlm.evaluation import QLM
from controlplane.experiments.sageserve import SAGESERVE
from controlplane.experiments.sageserve_mixed import SAGESERVE_MIXED
from controlplane.experiments.sessions import SESSIONS
from controlplane.experiments.shipped_lengths import SHIPPED_LENGTHS
from controlplane.experiments.ssjf import SSJF

EXPERIMENTS: Final[dict[str, Experiment]] = {
    each.name: each
    for each in (
        SAGESERVE,
        SAGESERVE_MIXED,
        PRESERVE_SCALING,
        PRESERVE_ROUTING,
        SSJF,
        QLM,
        HERMES,
        HERMES_PREWARMING,
        LENGTH_MODELS,
        SHIPPED_LENGTHS,
        BURSTS,
        PROMISES,
        SESSIONS,
    )
}
