"""All inline PTX of the Hopper kernels: one function for each operation that Gluon does not have.

``gl.inline_asm_elementwise`` emits its code once for every ``pack`` elements of a thread. An instruction that each
thread executes once is therefore applied to a vector with one element per thread, and code that needs all elements that
a thread holds of a tile packs the whole tile. ``is_pure=False`` makes the code volatile: the compiler neither removes
it nor moves it across other volatile code.

The code assumes the hardware's layout of a WGMMA result [64, columns]: of each 8 columns a thread holds two adjacent
ones of its first row, then the same two of its second row, 8 rows below.
"""
