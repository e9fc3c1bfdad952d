"""The length models."""
