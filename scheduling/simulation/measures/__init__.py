"""Measures of a simulation, as figures and tables."""
