"""The format on disk: manifests, signatures, selection."""
