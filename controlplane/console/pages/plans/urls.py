from django.urls import path

from controlplane.console.pages.plans import views

urlpatterns = [
    path("scaling/plans/", views.plans, name="plans"),
    path("scaling/plans/<int:pk>/", views.plan, name="plan"),
    path("scaling/moves/", views.moves, name="moves"),
]
