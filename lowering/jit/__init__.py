"""`jit`: a function captured once for each shape of its arguments, and the backends that replay it."""
