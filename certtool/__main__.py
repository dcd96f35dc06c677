"""`python -m certtool`, the same as `certtool`; what torchrun starts."""

from certtool.cli.app import main

main()
