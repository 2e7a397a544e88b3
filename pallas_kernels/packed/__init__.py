"""Matrices of 4 or 8 bits a weight, as they lie in memory and as they are multiplied with.

A weight is w = (code - zero) * scale, computed in the scale's dtype and rounded to it once, as the library compressed-tensors does it
(`compressed_tensors/quantization/lifecycle/forward.py`). If a matrix is affine, as those of
llama.cpp's Q4_K, Q5_K, Q4_1 and Q5_1 are, its zeros are the numbers that codes of 0 stand for: w = code * scale + zero, rounded once too.
That number is what a packed matrix means, on every device and for every number of rows.

**The order in memory.** A matrix is cut into blocks of 64 outputs by 64 inputs. A block lies in 32-bit words in the order in which the
tensor core's instruction for 64 x 16 numbers (`wgmma.m64n?k16`, and four times `mma.m16n8k16`) wants them in registers. So a thread reads
16 consecutive bytes, and what it unpacks is its operand, with no exchange between threads. A block of 4-bit codes has one slab of
[32, 16] words, a block of 8-bit codes two slabs, of 32 inputs each.

With output o = 16 w + 8 h + r of the block and input i = 16 s + 8 e + 2 c + b of the slab (h, e, b: one bit; r < 8; c, w < 4), the code
lies in row 8 w + r of the slab, and
- of 4 bits (s < 4): in word 4 c + s, nibble h + 2 e + 4 b, counted from the least significant;
- of 8 bits (s < 2): in word 4 c + 2 s + e, byte h + 2 b.
So the two codes of a pair (b = 0, 1) always lie 16 bits apart, and one operation on a word unpacks both into two 16-bit floats.

The 16 bits of two codes of "fp8" (h = 0, 1) lie in yet another order, since as a bfloat16 a code has its sign in bit 15 and the other
bits, from the exponent's down, in bits 10 to 4. There the code of h = 0 has them. The other has its sign in bit 11, the first three bits
in bits 14 to 12 and the last four in bits 3 to 0: the places that are left, and one shift each way brings them where they belong.

Scales of a block, and zeros where there are any, lie in rows of the same order, [32, 2 G] with G groups of inputs: column 2 g + h.
"""

from pallas_kernels.packed.matrix import BLOCK, KINDS, Packed, abstract, groups_of, pack, rounded, unpack, unpack_rows, values_of

__all__ = ["BLOCK", "KINDS", "Packed", "abstract", "groups_of", "pack", "rounded", "unpack", "unpack_rows", "values_of"]
