"""Execution of plans and strategies: instances are started, drained and stopped."""
