"""Names in paths of the API: `/api/models/meta-llama/Llama-3.1-8B`, with "/" or %2F."""

from typing import Final

from django.urls import register_converter
from django.urls.converters import StringConverter

from controlplane.fleet.validators import ACTIONS

NAME: Final = "{name:name}"
"""Part of a path that is the argument `name`."""


class NameConverter(StringConverter):
    """A name that may hold slashes; it ends before the action that follows it in the path."""

    regex = f".+?{''.join(f'(?<!/{action})' for action in ACTIONS)}"


register_converter(NameConverter, "name")
