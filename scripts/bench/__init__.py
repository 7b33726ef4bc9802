"""The benchmark harness: systems under test, each in its own process, and the measurements made on them."""
