"""Model families, one file each: config, parameters, layers, forward."""
