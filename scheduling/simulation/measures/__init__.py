"""What came of a simulation, as figures and tables."""
