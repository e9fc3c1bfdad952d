"""Websocket client for tests, without a network: `channels.testing` needs daphne."""

import json
from typing import Any

from asgiref.testing import ApplicationCommunicator


class Socket:
    """Talks to *application* like a browser on *host* with *cookies*."""

    def __init__(
        self, application, path: str, cookies: dict[str, str], host: str = "localhost", origin: str = ""
    ) -> None:
        path, _, query = path.partition("?")
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        self._talk = ApplicationCommunicator(
            application,
            {
                "type": "websocket",
                "path": path,
                "query_string": query.encode(),
                "headers": [
                    (b"host", host.encode()),
                    (b"origin", (origin or f"http://{host}").encode()),
                    (b"cookie", cookie.encode()),
                ],
                "subprotocols": [],
            },
        )

    async def connect(self) -> bool:
        """Whether the server accepted the connection."""
        await self._talk.send_input({"type": "websocket.connect"})
        return (await self._talk.receive_output(3))["type"] == "websocket.accept"

    async def say(self, text: str) -> None:
        await self._talk.send_input({"type": "websocket.receive", "text": text})

    async def receive(self, timeout_s: float = 3) -> dict[str, Any]:
        """Return the next message; a close is `{"closed": code}`."""
        message = await self._talk.receive_output(timeout_s)
        if message["type"] == "websocket.close":
            return {"closed": message.get("code", 1000)}
        return json.loads(message["text"])

    async def next(self, kind: str, timeout_s: float = 5) -> dict[str, Any]:
        """Return the next message of *kind*, skipping others."""
        while True:
            message = await self.receive(timeout_s)
            if message.get("t") == kind or (kind == "closed" and "closed" in message):
                return message

    async def silent(self, timeout_s: float) -> bool:
        return await self._talk.receive_nothing(timeout_s)

    async def close(self) -> None:
        await self._talk.send_input({"type": "websocket.disconnect", "code": 1001})
        await self._talk.wait(3)
