"""What was chosen and why, at what cost: reports, lowered programs, and the tables that they print as."""
