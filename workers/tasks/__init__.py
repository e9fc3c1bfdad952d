"""Celery tasks, one module per subject."""
