"""Steps of whole attention layers in CUDA graphs, part by part."""
