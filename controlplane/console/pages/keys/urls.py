from django.urls import path

from controlplane.console.pages.keys import views

urlpatterns = [
    path("keys/", views.keys, name="keys"),
    path("keys/<int:pk>/created/", views.created, name="key-created"),
    path("keys/<int:pk>/revoke/", views.revoke, name="revoke-key"),
]
