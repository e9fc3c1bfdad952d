from django.apps import AppConfig


class SimulationConfig(AppConfig):
    name = "controlplane.simulation"
    label = "simulation"
    verbose_name = "Simulation"
