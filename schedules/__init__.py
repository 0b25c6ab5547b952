"""Schedules, one package for each kind of target."""
