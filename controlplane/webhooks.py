"""Calls of webhooks: their time limit, what went wrong, and the pause after failures."""

import asyncio
import hashlib
import hmac
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

CALL_S: Final = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 1800.0
SIGNATURE: Final = "X-Pilothouse-Signature"


def pause_s(failures: int) -> float:
    """Return the pause after so many failures in a row."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


def signature(secret: str, body: bytes) -> str:
    """Return the value of `SIGNATURE`: the HMAC-SHA256 of *body* by *secret*, in hexadecimal digits."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


async def call(url: str, body: dict[str, Any], secret: str = "") -> str:
    """Post *body* as JSON to *url*, signed where there is a *secret*; return what went wrong, empty if the receiver
    accepted it. It takes `CALL_S` at most, follows no redirect, and reads only the status of the answer.
    """
    text = orjson.dumps(body)
    headers = {"Content-Type": "application/json"} | ({SIGNATURE: signature(secret, text)} if secret else {})
    try:
        async with (
            asyncio.timeout(CALL_S),
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(URL(url, encoded=True), data=text, headers=headers, allow_redirects=False) as response,
        ):
            if 300 <= response.status < 400:
                return f"answered {response.status}: redirects are not followed, give the final address"
            return "" if response.status < 300 else f"answered {response.status}"
    except TimeoutError:
        return f"did not answer within {CALL_S:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # The message of the error may have the address in it, which is a secret.
        return f"could not be reached: {type(error).__name__}"
