"""Models that several ranks share."""
