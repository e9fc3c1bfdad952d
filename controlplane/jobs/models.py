"""Runs of the periodic jobs that Celery runs."""

from django.db import models


class JobRow(models.Model):
    """One periodic job."""

    name = models.CharField(max_length=64, primary_key=True)
    last_success_at = models.DateTimeField(null=True, blank=True)
    last_error = models.TextField(blank=True)
    last_error_at = models.DateTimeField(null=True, blank=True)
    failures_in_a_row = models.PositiveIntegerField(default=0)
    failing_since = models.DateTimeField(null=True, blank=True)
    failures_total = models.PositiveIntegerField(default=0)
    last_duration_s = models.FloatField(null=True, blank=True)

    class Meta:
        db_table = "jobs_job"
        verbose_name = "job"
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
