"""Pilothouse: the Django project. Importing it registers the Celery application."""

from workers.celery import app as celery_app

__all__ = ["celery_app"]
__version__ = "0.1.0"
