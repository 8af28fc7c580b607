"""Wire messages: shim <-> daemon (`local`), daemon <-> daemon (`peer`), and what both share."""
