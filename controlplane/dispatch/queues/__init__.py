"""The living queues as operators see them, and what operators do to them."""
