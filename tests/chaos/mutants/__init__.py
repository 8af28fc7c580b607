"""Patches that each take one safety guard away, and the test that must see it."""
