"""How keys are split over the programs of a GPU, and partial results combined."""
