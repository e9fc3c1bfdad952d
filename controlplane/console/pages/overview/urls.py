from django.urls import path

from controlplane.console.pages.overview import views

urlpatterns = [
    path("", views.overview, name="overview"),
    path("console/api/charts", views.charts, name="charts"),
]
