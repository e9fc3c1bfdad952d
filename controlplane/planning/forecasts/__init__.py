"""Demand series and their forecasts."""
