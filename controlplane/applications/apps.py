from django.apps import AppConfig


class ApplicationsConfig(AppConfig):
    name = "controlplane.applications"
    default_auto_field = "django.db.models.BigAutoField"
