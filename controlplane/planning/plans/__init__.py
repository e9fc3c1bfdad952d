"""Scaling plans and their inputs."""
