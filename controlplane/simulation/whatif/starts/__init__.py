"""Starts other than the live fleet, and uploaded traces."""
