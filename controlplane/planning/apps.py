from django.apps import AppConfig


class PlanningConfig(AppConfig):
    name = "controlplane.planning"
    label = "planning"
    verbose_name = "Forecasts and scaling"

    def ready(self) -> None:
        from controlplane.planning.execution import strategies
        from controlplane.tuning import selectors

        selectors.checks.append(strategies.check_marks)
