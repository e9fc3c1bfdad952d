"""Paths of the console, the admin and the operator API. `/v1` and operations are routed in `asgi.py`."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path

from controlplane.api.urls import api
from controlplane.applications.api import urlpatterns as run_urls
from controlplane.batches.api import urlpatterns as batch_urls

admin.autodiscover()
urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("controlplane.console.urls")),
    path("", include(([*batch_urls, *run_urls], "v1"))),
    path("api/", api.urls),  # after the console, which has /api/docs: matches everything below /api
]
if settings.SINGLE_SIGN_ON:
    urlpatterns.insert(0, path("sso/", include("allauth.socialaccount.providers.openid_connect.urls")))

handler403 = "controlplane.console.pages.errors.views.forbidden"
handler404 = "controlplane.console.pages.errors.views.not_found"
handler500 = "controlplane.console.pages.errors.views.broken"
