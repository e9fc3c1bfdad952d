"""Admin of applications' limits, and of backends of units that are no LLM."""

from controlplane.applications.services import APPLICATION, UNIT_BACKEND
from controlplane.resources.admin import register

register(APPLICATION)
register(UNIT_BACKEND)
