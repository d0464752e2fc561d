"""What several operations use unchanged: device code by language, and the references' softmax."""
