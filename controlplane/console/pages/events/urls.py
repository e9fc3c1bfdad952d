from django.urls import path

from controlplane.console.pages.events import views

urlpatterns = [
    path("events/", views.events, name="events"),
    path("events/<int:pk>/", views.event, name="event"),
]
