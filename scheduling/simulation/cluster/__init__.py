"""A fleet of engines behind a dispatcher, in one compiled loop."""
