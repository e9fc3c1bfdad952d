"""All experiments, by name."""

from typing import Final

from controlplane.experiments.bursts import Bursts
from controlplane.experiments.experiment import Experiment
from controlplane.experiments.length_models import LengthModels
from controlplane.experiments.preserve_routing import PreserveRouting
from controlplane.experiments.preserve_scaling import PreserveScaling
from controlplane.experiments.promises import Promises
from controlplane.experiments.qlm.evaluation import Qlm
from controlplane.experiments.sageserve import SageServe
from controlplane.experiments.shipped_lengths import ShippedLengths
from controlplane.experiments.ssjf import Ssjf

EXPERIMENTS: Final[dict[str, Experiment]] = {
    experiment.name: experiment
    for experiment in (
        SageServe(),
        PreserveScaling(),
        PreserveRouting(),
        Ssjf(),
        Qlm(),
        LengthModels(),
        ShippedLengths(),
        Bursts(),
        Promises(),
    )
}
