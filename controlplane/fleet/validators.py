"""Checks of single values in the inventory. Each raises ValidationError with a sentence to show next to the field."""

import ipaddress
import re
import shlex
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator

HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")

ACTIONS = ("retire",)
"""What may follow a model's name in a path of the REST API, so that no name ends in it."""
validate_model_name = RegexValidator(
    rf"\A[A-Za-z0-9][A-Za-z0-9._:/-]*{''.join(f'(?<!/{action})' for action in ACTIONS)}\Z",
    "A model name begins with a letter or digit, holds letters, digits and . _ : / - alone, and does not end in "
    f"{' or '.join(f'/{action}' for action in ACTIONS)}.",
)
validate_model_source = RegexValidator(
    r"\A[^-\s\x00-\x1f][^\x00-\x1f]*\Z",
    "A folder or repository name does not begin with a dash or a space and has no control characters.",
)


def validate_host(value: str) -> None:
    """A host name, an IPv4 or a bare IPv6 address; no scheme and no port."""
    try:
        ipaddress.ip_address(value)
        return
    except ValueError:
        pass
    if not all(HOST_LABEL.fullmatch(label) for label in value.rstrip(".").split(".")):
        raise ValidationError("Enter a host name or an IP address, without scheme and port.")


def validate_base_url(value: str) -> None:
    """The address below which an instance has `/v1`, `/health` and `/metrics`.

    Host names need no dot (`http://vllm-0:8000` is common inside a cluster), so Django's URLValidator does not serve.
    """
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValidationError("Enter a base address such as http://10.0.0.7:8000.") from error
    if parts.scheme not in {"http", "https"}:
        raise ValidationError("The scheme of an instance is http or https.")
    if not parts.hostname or port == 0 or re.search(r"[\s\x00-\x1f\\]", value):
        raise ValidationError("Enter a base address such as http://10.0.0.7:8000.")
    validate_host(parts.hostname)
    if parts.username or parts.password:
        raise ValidationError("An address with a user name or password would show them on every page: leave them out.")
    if parts.query or parts.fragment or "?" in value or "#" in value:
        raise ValidationError("A base address has no ? and no #.")
    if value.endswith("/"):
        raise ValidationError("Leave out the slash at the end.")
    if parts.path.endswith("/v1") or "/v1/" in parts.path:
        raise ValidationError("Leave out /v1: Pilothouse adds it.")


def validate_kv_events(value: str) -> None:
    """Address of a server's KV events, and that of their replay after a blank."""
    addresses = value.split(" ")
    for address in addresses:
        try:
            parts = urlsplit(address)
            complete = parts.scheme == "tcp" and parts.port and not parts.path
        except ValueError:
            complete = False
        if not complete or len(addresses) > 2:
            raise ValidationError(
                "Enter the address of its events, and that of their replay after a blank, such as tcp://10.0.0.7:5557 "
                "tcp://10.0.0.7:5558."
            )
        validate_host(parts.hostname or "")


# Flags that Pilothouse sets itself from the rows; a second value would make the rows lie.
OWN_FLAGS = {
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--scheduling-policy",
    "--tensor-parallel-size",
    "-tp",
    "--api-key",
}


def validate_vllm_args(value: str) -> None:
    """Further flags of vLLM, as on a command line; they are passed as a list, never through a shell."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValidationError(f"These flags cannot be read: {error}.") from error
    if words and not words[0].startswith("-"):
        raise ValidationError("Flags begin with a dash.")
    own = sorted(OWN_FLAGS & {word.split("=")[0].replace("_", "-") for word in words})
    if own:
        raise ValidationError(f"Pilothouse sets {', '.join(own)} from its own rows.")


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# Variables that Pilothouse sets itself.
OWN_VARIABLES = {"CUDA_VISIBLE_DEVICES", "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE"}
LONGEST_VALUE = 4096


def validate_environment(value: object) -> None:
    """Environment variables of a server: names and texts."""
    if not isinstance(value, dict):
        raise ValidationError('Enter variables as {"NAME": "value"}.')
    for name, text in value.items():
        if not VARIABLE.fullmatch(name):
            raise ValidationError(f"{name!r} is not the name of an environment variable.")
        if name in OWN_VARIABLES:
            raise ValidationError(f"Pilothouse sets {name} itself.")
        if not isinstance(text, str):
            raise ValidationError(f"The value of {name} is not text: write it in quotes.")
        if "\0" in text or len(text) > LONGEST_VALUE:
            raise ValidationError(f"The value of {name} holds a NUL or more than {LONGEST_VALUE} characters.")


validate_token = RegexValidator(r"\A[\x21-\x7e]+\Z", "A token has printable ASCII characters and no spaces.")
