"""Drafts: cheap models that propose the next few tokens of each row, for the model itself to verify."""
