"""Predictions of request lengths and of demand. Imports nothing above and no Django."""
