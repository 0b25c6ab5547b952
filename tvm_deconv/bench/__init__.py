"""Times of layers: ours, those of other packages, and the floors that the machine sets."""
