"""Routers of the REST API, one per area; `controlplane.api.urls` joins them."""
