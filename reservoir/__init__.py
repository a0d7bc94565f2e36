"""Packed weights: rotations, codebook and affine encodings, the packed linear layer."""
