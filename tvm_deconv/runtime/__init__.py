"""From artifacts to calls: load, bind, call."""
