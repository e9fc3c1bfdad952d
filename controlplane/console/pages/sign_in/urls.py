from django.urls import path

from controlplane.console.pages.sign_in import views

urlpatterns = [
    path("sign-in/", views.sign_in, name="sign-in"),
    path("sign-in/<str:token>/", views.sign_in_by_link, name="sign-in-link"),
    path("sign-out/", views.sign_out, name="sign-out"),
]
