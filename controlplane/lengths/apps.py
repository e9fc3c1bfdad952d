from django.apps import AppConfig


class LengthsConfig(AppConfig):
    name = "controlplane.lengths"
    label = "lengths"
    verbose_name = "Output lengths"
