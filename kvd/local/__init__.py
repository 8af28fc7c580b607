"""The Unix socket on which shims talk to this daemon: one session per connection."""
