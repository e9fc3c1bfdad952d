"""Admin of backends of units that are no LLM."""

from controlplane.applications.services import UNIT_BACKEND
from controlplane.resources.admin import register

register(UNIT_BACKEND)
