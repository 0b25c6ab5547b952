"""Run the command line: ``python -m tvm_deconv``."""

from tvm_deconv.cli.main import main

main()
