"""Wire messages of kvd: shim <-> daemon (`local`), daemon <-> daemon (`peer`), and what both share."""
