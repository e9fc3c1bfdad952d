"""Applications: runs of several requests and other work, predicted and ordered as a whole (Hermes)."""
