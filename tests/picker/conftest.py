"""Fixtures of the picker, where its extra is installed."""

from importlib.util import find_spec

from tests.gateway.conftest import gateway_options, served  # noqa: F401

if find_spec("grpc") and find_spec("envoy"):
    from tests.picker.asking import asking  # noqa: F401
