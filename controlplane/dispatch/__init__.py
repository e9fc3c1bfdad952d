"""The decision side: live fleet, waiting queue, placement, heartbeats, look-ahead, the reactive floor."""
