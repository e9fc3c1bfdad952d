"""Traffic sent to a gateway: the demo's waves and application runs, and recorded traces."""
