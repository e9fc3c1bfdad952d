"""The fleet of the rows as one planning problem."""

import numpy as np
import pytest

from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Model, Node, Region, SwapGroup
from controlplane.planning.plans import inventory
from scheduling.planning.places import problem_of
from scheduling.planning.planner import solve
from tests.planning.conftest import PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("minute_windows")]
S = InstanceState


class TestInventory:
    def other_place(self, language_model, gpu_type, profile):
        """A second region, in which another model shares the GPUs."""
        west = Region.objects.create(name="us-west", title="US West")
        other = Model.objects.create(
            name="other", title="Other", weights_bytes=10**10, kv_bytes_per_token=10**5, context_tokens=4096
        )
        values = {"region": west, "gpu_type": gpu_type, "tensor_parallel": 2, "min_instances": 0, "max_instances": 4}
        return west, Deployment.objects.create(model=other, **values), other

    def problem(self, fleet, **tokens):
        theta = {(model, gpu): 1000.0 for model, _, gpu in fleet.deployments}
        demands = {place: np.array([500.0]) for place in {(model, region) for model, region, _ in fleet.deployments}}
        return problem_of(fleet.to_plan(), demands, {}, theta, 3600.0, 0.8)

    def test_gpus_of_nodes_are_the_capacity_and_what_others_hold_is_not(self, make_instance, node, deployment):
        make_instance(node=node), make_instance(node=node, state=S.FAILED), make_instance(node=node, state=S.DRAINING)
        fleet = inventory.read({PLACE[0]})
        assert fleet.present == {(*PLACE, "a100-80gb"): 1}
        assert fleet.units == {("us-east", "a100-80gb"): 6}
        assert inventory.read(set()).deployments == {}

    def test_a_model_is_never_planned_where_it_is_not_deployed(
        self, make_instance, node, deployment, language_model, gpu_type, profile
    ):
        west, _, _ = self.other_place(language_model, gpu_type, profile)
        Node.objects.create(name="west-1", region=west, gpu_type=gpu_type, gpu_count=8)
        planned = self.problem(inventory.read({PLACE[0], "other"}))
        problem = planned.problem
        i, j = problem.models.index(PLACE[0]), problem.regions.index("us-west")
        assert problem.models == ("llama-3.1-8b", "other")
        for k in range(len(problem.gpu_types)):
            assert problem.capability_tokens_per_s[i, k] == 0 or problem.capacity[j, k] == 0
        plan = solve(problem)
        assert not plan.targets[i, j].any()
        assert plan.targets[problem.models.index("other"), j].sum() == 1

    def test_more_instances_than_the_nodes_hold_is_no_error(self, make_instance, node):
        for _ in range(3):
            make_instance()
        Node.objects.update(gpu_count=2)
        problem = self.problem(inventory.read({PLACE[0]})).problem
        assert problem.capacity.tolist() == [[6]]

    def test_without_nodes_the_bounds_are_the_capacity(self, node, deployment):
        node.delete()
        assert self.problem(inventory.read({PLACE[0]})).problem.capacity.tolist() == [[6]]

    def test_one_that_sleeps_on_shared_gpus_is_no_spare_one(self, make_instance, node):
        group = SwapGroup.objects.create(name="shared")
        for state in (S.READY, S.SLEEPING):
            make_instance(node=node, state=state, swap_group=group)
        problem = self.problem(inventory.read({PLACE[0]})).problem
        assert (problem.instances.tolist(), problem.spot.tolist()) == ([[[1]]], [[[0]]])

    def test_a_sleeping_instance_is_the_nearest_spare_one(self, make_instance, node):
        make_instance(node=node), make_instance(node=node, state=S.SLEEPING)
        problem = self.problem(inventory.read({PLACE[0]})).problem
        assert (problem.instances.tolist(), problem.spot.tolist()) == ([[[1]]], [[[1]]])
