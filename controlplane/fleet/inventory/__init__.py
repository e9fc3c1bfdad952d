"""The inventory as values with names: what `/api` takes and what a fleet file holds, checked by one and the same rules."""
