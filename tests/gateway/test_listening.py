"""Many clients that connect at once are accepted within few iterations of the event loop."""

import asyncio
import socket

import pytest
import uvloop

from controlplane.listening import ACCEPTED_PER_ITERATION, create_loop

CLIENTS = 200


class Greeting(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


def greeted(clients: list[socket.socket]) -> int:
    greeted = 0
    for client in clients:
        with client:
            client.settimeout(5)
            greeted += client.recv(16) == b"hello"
    return greeted


async def iterations_until_accepted() -> int:
    """Iterations of the loop until each of `CLIENTS`, all connected before the first iteration, has been accepted."""
    loop, accepted = asyncio.get_running_loop(), []

    def accept():
        accepted.append(None)
        return Greeting()

    server = await loop.create_server(accept, "127.0.0.1", 0, backlog=1024)
    address = server.sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(CLIENTS)]
    iterations = 0
    while len(accepted) < CLIENTS:
        await asyncio.sleep(0)
        iterations += 1
    assert await asyncio.to_thread(greeted, clients) == CLIENTS
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    return iterations


def test_connections_are_accepted_many_at_a_time():
    with asyncio.Runner(loop_factory=create_loop) as runner:
        iterations = runner.run(iterations_until_accepted())
    assert iterations <= CLIENTS // ACCEPTED_PER_ITERATION + 5


def test_what_the_loop_does_without_it():
    """When this fails, libuv accepts more than one connection an iteration again and `controlplane.listening` can go."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(iterations_until_accepted()) >= CLIENTS
