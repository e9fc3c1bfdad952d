"""Compiled decisions of `scheduling.compiled`, as the live dispatcher calls them."""

from scheduling import dispatch as decisions
from scheduling.compiled import direct
from scheduling.lookahead import maps, outlook
from scheduling.queueing import virtual_queues, waiting_set
from scheduling.routing import (
    adapters,
    cached_blocks,
    candidates,
    predictive,
    prefix_affinity,
    regions,
    requests_ahead,
    routers,
)

choose_region = direct(regions.choose_region)
first_with_room = direct(regions.first_with_room)
add_prefill = direct(regions.add_prefill)
enqueue = direct(waiting_set.enqueue)
dispatch = direct(decisions.dispatch)
dispatch_ahead = direct(predictive.dispatch_ahead)
pull = direct(virtual_queues.pull)
may_balance = direct(virtual_queues.may_balance)
insert_loose = direct(virtual_queues.insert_loose)
send = direct(decisions.send)
write_loads = direct(candidates.write_loads)
learn = direct(prefix_affinity.learn)
know = direct(prefix_affinity.know)
forget_known = direct(prefix_affinity.forget_known)
hold_blocks = direct(cached_blocks.hold)
drop_blocks = direct(cached_blocks.drop)
chain_blocks = direct(cached_blocks.chain)
peek = direct(waiting_set.peek)
free_slot = direct(waiting_set.free_slot)
waiting_tokens = direct(outlook.waiting_tokens)
prefilled = direct(routers.prefilled)
release = direct(routers.release)
advance_many = direct(routers.advance_many)
note_end = direct(requests_ahead.note_end)
note_round_trip = direct(requests_ahead.note_round_trip)
tier_of = direct(adapters.tier_of)
use_adapter = direct(adapters.use_adapter)
end_use = direct(adapters.end_use)
drop_adapter = direct(adapters.drop_adapter)
enter_map = direct(maps.add)
leave_map = direct(maps.finish)
move_in_map = direct(maps.token_many)
