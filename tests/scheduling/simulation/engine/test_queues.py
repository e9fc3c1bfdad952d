import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.engine.queues import QUEUES, FcfsQueue, PriorityQueue

operations = st.lists(
    st.tuples(st.sampled_from(["push", "push_back", "remove", "pop"]), st.integers(0, 5)), max_size=50
)


@pytest.mark.parametrize("policy", QUEUES)
@given(operations=operations, priorities=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_a_queue_is_as_a_plain_list(policy, operations, priorities):
    queue, plain = QUEUES[policy](), []
    keys = {str(number): (priorities[number], 0.0, number) for number in range(6)}
    for operation, number in operations:
        request_id = str(number)
        if operation in {"push", "push_back"}:
            if request_id in plain:
                continue
            getattr(queue, operation)(request_id, keys[request_id])
            plain.insert(0 if operation == "push_back" else len(plain), request_id)
        elif operation == "remove" and request_id in plain:
            queue.remove(request_id)
            plain.remove(request_id)
        elif operation == "pop" and plain:
            first = min(plain, key=keys.get) if policy == "priority" else plain[0]
            assert queue.peek() == first
            queue.remove(first)
            plain.remove(first)
        assert len(queue) == len(plain)


@pytest.mark.parametrize("queue", [FcfsQueue(), PriorityQueue()])
def test_an_empty_queue_has_no_head(queue):
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(KeyError):
        queue.remove("unknown")
