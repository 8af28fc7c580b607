"""What runs inside the engine: the client of the kvd daemon, and vLLM's connector on top of it."""
