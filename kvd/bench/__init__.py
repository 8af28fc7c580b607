"""`kvd bench`: how fast KV moves between two daemons, against what the machine can do."""
