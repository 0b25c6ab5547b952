"""Run the command line: ``python -m tvm_deconv``."""

from tvm_deconv_command import main

main()
