"""Checks a certificate again: structure, hashes, counts, and the proofs themselves by a second implementation."""

from certtool.verification.recheck.check import recheck
from certtool.verification.recheck.outcome import Recheck, merged

__all__ = ["Recheck", "merged", "recheck"]
