"""Processes besides the web process: Celery tasks, vLLM instances, the emulated fleet."""
