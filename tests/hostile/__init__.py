"""Hostile input against live daemons: nothing is executed, kept or lost, and others are served."""
