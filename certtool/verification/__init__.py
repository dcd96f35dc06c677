"""Verification: for how many images is it proven that no perturbation of size eps changes the label?"""

from certtool.verification.verify import EpsResult, VerifyReport, verify

__all__ = ["EpsResult", "VerifyReport", "verify"]
