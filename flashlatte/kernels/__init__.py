"""Device code that several operations share, by language, and the softmax of the references."""
