"""Data sets, fitting and scoring of length models."""
