"""Tests, laid out as the packages are. `cases` holds the arguments of every op, `tolerances` every bound."""
