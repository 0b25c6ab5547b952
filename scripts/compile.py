#!/usr/bin/env python3
"""Compile the layers of models and lists of problems: tvm-deconv compile, from a checkout."""

from _checkout import run

if __name__ == "__main__":
    run("compile")
