"""What is observed: Lightning callbacks that measure and report."""
