"""Shape checks, for tests and notebooks."""
