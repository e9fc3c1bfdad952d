"""Client of the control side of a vLLM server: health, load, sleep, wake, adapters. Tenants' requests use the gateway."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import orjson

from workers.vllm.metrics import VllmMetrics, parse


class VllmError(Exception):
    """The server did not answer (`status` is None), or its answer was not the expected one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of `/v1/models`: the base model, or an adapter whose `parent` is the base model."""

    id: str
    max_model_len: int | None
    root: str | None
    parent: str | None


class VllmClient:
    """Client of one server at *url* (without `/v1`).

    *api_key* is the token that the server asks for. With a *session* the caller owns it (one for many servers); without,
    use `async with VllmClient(url) as client`.
    Every call but `health` raises VllmError. Sleep and wake-up exist if the server runs with `VLLM_SERVER_DEV_MODE=1`;
    adapters need `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession | None = None, *, api_key: str = "", timeout_s: float = 3.0
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._session = session
        self._owned: aiohttp.ClientSession | None = None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session if this client opened it."""
        if self._owned is not None:
            await self._owned.close()
            self._owned = None

    async def health(self) -> bool:
        """Return whether `/health` answers 200; never raises."""
        try:
            await self._call("GET", "/health")
        except VllmError:
            return False
        return True

    async def metrics(self) -> VllmMetrics:
        return parse(await self._call("GET", "/metrics"))

    async def models(self) -> list[ModelCard]:
        cards = (await self._json("GET", "/v1/models")).get("data", [])
        return [
            ModelCard(card["id"], card.get("max_model_len"), card.get("root"), card.get("parent")) for card in cards
        ]

    async def version(self) -> str:
        return str((await self._json("GET", "/version")).get("version", ""))

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Put the server to sleep: level 0 stops scheduling, 1 moves weights to host memory, 2 drops them.

        *mode* applies to running requests. With "wait" the answer comes when they are done, so the timeout of this client
        must be long enough.
        """
        await self._call("POST", "/sleep", params={"level": str(level), "mode": mode})

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Wake the whole server, or only *tags* out of "weights", "kv_cache", "scheduling"."""
        await self._call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

    async def is_sleeping(self) -> bool:
        return bool((await self._json("GET", "/is_sleeping")).get("is_sleeping"))

    async def reload_weights(self) -> None:
        """Reload the weights: needed after a sleep at level 2."""
        await self._call("POST", "/collective_rpc", body={"method": "reload_weights"})

    async def reset_prefix_cache(self) -> None:
        """Drop cached prefixes: they were computed with other weights, or are gone."""
        await self._call("POST", "/reset_prefix_cache")

    async def prefill(self, path: str, body: bytes) -> None:
        """Have a prompt computed: *body* asks for one token of it at *path*."""
        await self._call("POST", path, raw=body)

    async def load_lora_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter onto the GPU, *in_place* even if it is loaded."""
        body: dict[str, object] = {"lora_name": name, "lora_path": path} | ({"load_inplace": True} if in_place else {})
        await self._call("POST", "/v1/load_lora_adapter", body=body)

    async def unload_lora_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        try:
            value = orjson.loads(await self._call(method, path))
        except orjson.JSONDecodeError as error:
            raise VllmError(f"{self.url}{path} did not answer with JSON", 200) from error
        if not isinstance(value, dict):
            raise VllmError(f"{self.url}{path} did not answer with a JSON object", 200)
        return value

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | list[tuple[str, str]] | None = None,
        body: dict[str, object] | None = None,
        raw: bytes | None = None,
    ) -> bytes:
        session = self._session
        if session is None:
            session = self._owned = self._owned or aiohttp.ClientSession()
        try:
            async with session.request(
                method,
                self.url + path,
                params=params,
                json=body,
                data=raw,
                headers={**(self._headers or {}), **({"Content-Type": "application/json"} if raw else {})},
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                answer = await response.read()
                status = response.status
        except TimeoutError as error:
            raise VllmError(f"{self.url}{path} did not answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise VllmError(f"{self.url}{path} cannot be reached: {error}") from error
        if status != 200:
            text = answer[:300].decode("utf-8", "replace")
            raise VllmError(f"{self.url}{path} answered {status}: {text}", status)
        return answer
