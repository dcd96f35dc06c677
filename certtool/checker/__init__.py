"""The proofs a second time, in NumPy alone: what a third party runs to re-check a certificate.

Nothing is shared with the code that certifies: the file is parsed here, the convolution is written here, the bounds are
derived here. `rigorous_margins` bounds what binary32 arithmetic computes, `interval_margins` and `crown_ibp_margins`
what exact arithmetic would.

The claim of `rigorous_margins`: every evaluation in IEEE binary32, round to nearest (subnormals kept or flushed), whose
dot products are multiplications or FMAs and additions in any order, with BatchNorm as written, as scale and shift, or
folded into the weights, gives the label. Not in it: Winograd or FFT convolution, TF32 and bf16, a convolution that
accumulates on top of its residual shortcut.
"""

from certtool.checker.box import exact_box
from certtool.checker.crown import crown_ibp_margins
from certtool.checker.file import read_network
from certtool.checker.intervals import forward
from certtool.checker.margins import interval_margins, proven, rigorous_margins
from certtool.checker.network import Network

__all__ = ["Network", "crown_ibp_margins", "exact_box", "forward", "interval_margins", "proven", "read_network"]
__all__ += ["rigorous_margins"]
