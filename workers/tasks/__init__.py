"""Celery tasks, one module a subject."""
