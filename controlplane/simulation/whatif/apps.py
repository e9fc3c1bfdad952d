from django.apps import AppConfig


class WhatIfConfig(AppConfig):
    name = "controlplane.simulation.whatif"
    label = "whatif"
    verbose_name = "What-if"
