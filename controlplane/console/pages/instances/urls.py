from django.urls import path

from controlplane.console.pages.instances import rollouts, views

urlpatterns = [
    path("instances/", views.instances, name="instances"),
    path("instances/<slug:name>/", views.instance, name="instance"),
    path("instances/<slug:name>/<slug:action>/", views.act, name="act"),
    path("rollouts/<int:pk>/<slug:action>/", rollouts.act, name="rollout"),
]
