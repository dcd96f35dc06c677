"""The zoo: certified models with their proofs, as records in this repository and as repositories on the Hub.

Only records and references are imported here: `certtool zoo list` answers without torch and without a network.
"""

from certtool.zoo.records import Record, Result, find_record, records, zoo_folder
from certtool.zoo.reference import HubRef, LocalRef, ModelRef, ZooRef, parse_reference

__all__ = ["HubRef", "LocalRef", "ModelRef", "Record", "Result", "ZooRef"]
__all__ += ["find_record", "parse_reference", "records", "zoo_folder"]
