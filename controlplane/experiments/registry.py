"""All experiments, by name."""

from typing import Final

from controlplane.experiments import (
    bursts,
    length_models,
    preserve_routing,
    preserve_scaling,
    sageserve,
    shipped_lengths,
    ssjf,
)
from controlplane.experiments.experiment import Experiment
from controlplane.experiments.qlm import evaluation as qlm

EXPERIMENTS: Final[dict[str, Experiment]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        sageserve, preserve_scaling, preserve_routing, ssjf, qlm, length_models, shipped_lengths, bursts,
    )
}  # fmt: skip
