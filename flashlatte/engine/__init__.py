"""A serving engine small enough to read: pages with a prefix cache, a scheduler."""
