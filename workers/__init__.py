"""What runs beside, or on behalf of, the web process: Celery tasks, vLLM instances, the emulated fleet."""
