"""Routing of a request to a region and an instance."""
