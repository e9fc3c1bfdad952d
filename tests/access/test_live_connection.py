"""The live connection as every role: which topics are sent, and that nothing leaks in them.

By itself, for it needs real transactions: its rows are written for it alone.
"""

import pytest
from channels.db import database_sync_to_async

from controlplane.asgi import websockets
from controlplane.console.live import consumers
from tests.access import expected
from tests.access.expected import RANKS
from tests.access.leaks import check
from tests.access.world import World
from tests.console.sockets import Socket


@pytest.mark.django_db(transaction=True)
async def test_the_live_connection(world, sign_in):
    for role in RANKS:
        client = await database_sync_to_async(sign_in)(role)
        await see_topics(world, role, {name: morsel.value for name, morsel in client.cookies.items()})


async def see_topics(world: World, role: str, cookies: dict[str, str]) -> None:
    for topics, least in (*expected.TOPICS.items(), (",".join(expected.TOPICS), max(expected.TOPICS.values()))):
        socket = Socket(websockets, f"/ws/live/?topics={topics}", cookies)
        assert await socket.connect()
        first = await socket.receive()
        if RANKS[role] < least:
            assert first == {"closed": consumers.SIGNED_OUT if role == "anonymous" else consumers.NOT_ALLOWED}
            continue
        shown = [first, *[await socket.receive() for _ in topics.split(",")]]  # the first topic is that of every page
        assert not check(world, role, topics, str(shown))
        await socket.close()
