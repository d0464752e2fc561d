"""Variable-length attention in Gluon, for SM90: the packages ``forward`` and ``backward`` do not import each other."""
