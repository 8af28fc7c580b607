"""Ways to move bytes from a producer engine's blocks into a consumer engine's blocks."""
