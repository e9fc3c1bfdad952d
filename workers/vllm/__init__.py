"""Talking to vLLM servers and starting them. No Django in here: Celery tasks, the gateway and tests all use it."""
