"""Carrying plans and strategies out: instances are started, drained and stopped."""
