"""pytest plugins of this test suite."""
