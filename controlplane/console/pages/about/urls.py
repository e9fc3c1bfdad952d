from django.urls import path

from controlplane.console.pages.about import views

urlpatterns = [
    path("about/", views.about, name="about"),
]
