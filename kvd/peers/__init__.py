"""Daemon to daemon: ROUTER (those who ask us), DEALER (those we ask), and the same-host link."""
