"""The live queues as operators see them, and the actions on them."""
