"""What somebody may start from beside the living fleet, and the traces that were uploaded for it."""
