"""Clients and launchers of vLLM servers. No Django: Celery tasks, the gateway and tests use it."""
