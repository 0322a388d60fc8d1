"""The arithmetic between a decoder's projections, once for PyTorch and once for Triton."""
