"""Admin of settings, which are changed on the Settings page: a row overrides the default."""

from controlplane.resources.admin import show
from controlplane.tuning.models import Setting

show(Setting, "name", "model", "value", "changed_at", "changed_by", search=("name", "model__name", "changed_by"))
