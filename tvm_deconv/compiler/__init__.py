"""From a problem to an artifact."""
