"""Runs the kernels without a GPU: nvcc's PTX, translated to C++, against a runtime that checks what it does."""
