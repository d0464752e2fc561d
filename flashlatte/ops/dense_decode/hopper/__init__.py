"""Dense decode in Gluon, for SM90."""
