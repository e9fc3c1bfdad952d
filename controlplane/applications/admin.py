"""Admin of backends of units that are no LLM."""

from controlplane.resources.admin import register
from controlplane.resources.applications import UNIT_BACKENDS

register(UNIT_BACKENDS)
