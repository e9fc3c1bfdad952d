from django.urls import path

from controlplane.console.pages.scaling import views

urlpatterns = [
    path("scaling/", views.scaling, name="scaling"),
    path("scaling/plans/<int:pk>/<slug:decision>/", views.decide, name="decide"),
    path("scaling/policies/<int:pk>/", views.policy, name="policy"),
    path("console/api/scaling-charts", views.charts, name="scaling-charts"),
]
