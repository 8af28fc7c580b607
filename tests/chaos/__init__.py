"""Faults at random against real daemons, with an oracle that knows the owner of every byte."""
