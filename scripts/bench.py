#!/usr/bin/env python3
"""Time layers, ours and those of other packages: tvm-deconv bench, from a checkout."""

from _checkout import run

if __name__ == "__main__":
    run("bench")
