"""What depends on the GPU or on Triton's version, and the device functions that all kernels share. Knows no operator."""
