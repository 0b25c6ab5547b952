"""The tuning logs that are installed with the package."""
