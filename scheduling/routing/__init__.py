"""Which region and which instance is given a request."""
