from django.urls import path

from controlplane.console.pages.lengths import views

urlpatterns = [
    path("lengths/", views.lengths, name="lengths"),
    path("lengths/roll-back/", views.roll_back, name="roll-back-lengths"),
    path("lengths/train/", views.train, name="train-lengths"),
    path("lengths/versions/<int:version_number>/<slug:decision>/", views.decide, name="decide-length-version"),
    path("console/api/length-charts", views.charts, name="length-charts"),
]
