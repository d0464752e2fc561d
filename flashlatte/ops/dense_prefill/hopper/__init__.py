"""Variable-length attention in Gluon, for SM90: packages ``forward`` and ``backward``, neither imports the other."""
