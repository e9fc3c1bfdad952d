"""A router for each part of the REST API; `controlplane.api.urls` joins them."""
