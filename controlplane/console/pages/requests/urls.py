from django.urls import path

from controlplane.console.pages.requests import views

urlpatterns = [
    path("requests/", views.requests, name="requests"),
    path("requests/<int:pk>/", views.request_detail, name="request"),
]
