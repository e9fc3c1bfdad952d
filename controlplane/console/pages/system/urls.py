from django.urls import path

from controlplane.console.pages.system import views

urlpatterns = [
    path("system/", views.system, name="system"),
]
