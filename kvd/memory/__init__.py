"""Engine memory as the daemon sees it: segments mapped from passed fds, layouts, fence tables."""
