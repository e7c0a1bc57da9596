"""Real processes, and fleets of them."""
