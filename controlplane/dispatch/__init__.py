"""The decision side: the live fleet, the waiting queue, placement, heartbeats, look-ahead, the reactive floor."""
