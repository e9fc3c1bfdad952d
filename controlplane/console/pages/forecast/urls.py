from django.urls import path

from controlplane.console.pages.forecast import views

urlpatterns = [
    path("forecast/", views.forecast, name="forecast"),
    path("console/api/forecast-charts", views.charts, name="forecast-charts"),
]
