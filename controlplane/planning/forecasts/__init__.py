"""Demand as series, and its forecasts as rows."""
