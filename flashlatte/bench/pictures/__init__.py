"""Pictures of results in docs/, one module for each."""
