"""One file per architecture: from a problem to its kernel configurations."""
