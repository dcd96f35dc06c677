"""Verification: for how many images is it proven that no perturbation of size eps changes the label?"""

from certtool.verification.certificate import read_certificate, write_certificate
from certtool.verification.ladder import METHODS, LadderSettings, Method, Unsound
from certtool.verification.radius import Radii, largest_radii
from certtool.verification.verdicts import EpsResult, Grade, ImageVerdict
from certtool.verification.verify import VerifyReport, verify, verify_network

__all__ = [
    "METHODS",
    "EpsResult",
    "Grade",
    "ImageVerdict",
    "LadderSettings",
    "Method",
    "Radii",
    "Unsound",
    "VerifyReport",
]
__all__ += ["largest_radii", "read_certificate", "verify", "verify_network", "write_certificate"]
