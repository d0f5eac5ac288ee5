"""What a model remembers of its rows, and the tokens that it is given next."""
