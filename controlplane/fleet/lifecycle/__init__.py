"""Lifecycle of an instance: states, launching and restarts."""
