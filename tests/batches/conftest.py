from tests.gateway.conftest import gateway_options, served

__all__ = ["gateway_options", "served"]
