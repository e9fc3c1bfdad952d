"""One class per concern of the queue, under both clocks: each acts on a fleet through the protocol `fleet.Fleet`."""
