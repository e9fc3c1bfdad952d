"""Starts other than the live fleet, and the traces uploaded for them."""
