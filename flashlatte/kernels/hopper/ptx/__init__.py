"""All PTX that Hopper kernels write by hand: a function for each thing that Gluon has no word for.

``gl.inline_asm_elementwise`` runs its text once for every ``pack`` elements that a thread holds. So an instruction that
a thread executes once stands on a vector with one element a thread, and one that needs all that a thread has of a tile
packs the whole tile. ``is_pure=False`` makes text volatile: it is neither removed nor moved over other volatile text.

Text takes a WGMMA's result [64, columns] as the hardware lays it out: of each 8 columns a thread holds two neighbours
of its first row, and then the same two of its second row, 8 rows below.
"""
